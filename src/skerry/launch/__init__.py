"""Starting the parts of a run: processes on this machine."""
