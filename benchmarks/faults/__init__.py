"""Parts of benchmarks/faults.py: the replicas' loops, a driver for each system, the faults and what is measured of them."""
