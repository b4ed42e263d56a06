"""The algorithm as pure code: no sockets, threads, files, clocks or tensor data. The rest of Skerry is I/O around it."""
