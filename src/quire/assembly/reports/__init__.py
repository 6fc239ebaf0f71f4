"""Reports on models and machines: the memory, work and speed of an engine before it runs."""
