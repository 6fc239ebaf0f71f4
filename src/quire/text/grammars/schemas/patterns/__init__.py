"""Regular expressions of schemas, written for llguidance; look-ahead as sets of texts."""
