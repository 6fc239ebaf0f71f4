"""Names in transformers, known without importing it: model types, and fields that configs have."""
