"""The CPU service that holds the global model and merges contributions: the I/O around skerry.core."""
