"""Executes step plans on a model: input tensors, KV storage, CUDA graphs, worker processes."""
