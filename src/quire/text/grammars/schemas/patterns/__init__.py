"""Regular expressions of schemas: parsing, look-ahead, and translation for the grammar engine."""
