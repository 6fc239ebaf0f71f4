"""KV memory as it was managed before paging, to compare with."""
