"""`python -m benchmarks.memory`: paging measured against contiguous KV memory."""
