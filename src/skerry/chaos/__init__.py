"""Fault injection: plan faults, inject them, heal them and record both. A run without faults pays one `os.stat` per step."""
