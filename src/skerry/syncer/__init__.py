"""The CPU service that holds the global model and merges: I/O around skerry.core."""
