"""Faults on purpose: planned, carried out, healed and written down. A run without faults pays one `os.stat` for each step."""
