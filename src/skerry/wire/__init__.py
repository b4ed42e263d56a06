"""What travels between learners and the syncer: messages, chunk streams, connections. Foreign errors become ours here."""
