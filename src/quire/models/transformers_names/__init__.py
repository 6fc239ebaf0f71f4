"""Model types and config fields of transformers, without importing it."""
