"""NUMA: which cores and memory nodes an engine's parts get, and keep to."""
