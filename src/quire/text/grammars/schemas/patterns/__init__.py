"""Regular expressions of schemas: parsed, with look-ahead, and written for the grammar engine."""
