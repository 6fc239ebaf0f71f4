"""How options are declared, and all options of an engine."""
