"""Parts of benchmarks/faults.py: the replicas' loops, a driver per system, the faults and their measurements."""
