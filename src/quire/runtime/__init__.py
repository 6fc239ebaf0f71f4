"""Where tensors live: rows, batches, forward passes, the KV cache, workers."""
