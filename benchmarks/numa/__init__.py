"""A guest with several memory nodes, and where an engine's pages lie there."""
