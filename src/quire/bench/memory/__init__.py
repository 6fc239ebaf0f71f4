"""`quire bench memory`: paging measured against contiguous KV memory."""
