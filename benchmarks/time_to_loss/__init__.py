"""Parts of benchmarks/time_to_loss.py."""
