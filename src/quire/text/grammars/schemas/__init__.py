"""JSON Schema: what is enforced of it, and its translation for the grammar engine."""
