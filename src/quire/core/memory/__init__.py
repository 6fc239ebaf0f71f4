"""The KV cache: block allocation, prefix sharing, eviction and the tiers behind it."""
