"""NUMA: chooses cores and memory nodes for each rank, and binds threads and memory."""
