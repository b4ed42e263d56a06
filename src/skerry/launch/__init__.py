"""Start and supervise the processes of a run on this machine."""
