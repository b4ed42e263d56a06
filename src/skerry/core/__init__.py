"""The algorithm, pure: no sockets, threads, files or clock. Everything else in Skerry is I/O around this package."""
