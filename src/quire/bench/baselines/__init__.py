"""KV memory as it was managed before paging, for comparison."""
