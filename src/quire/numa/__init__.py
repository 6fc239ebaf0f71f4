"""NUMA: chooses the cores and memory nodes of each rank, and binds threads and memory to them."""
