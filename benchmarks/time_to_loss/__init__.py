"""Parts of the benchmark time_to_loss.py."""
