"""Options: how they are declared, and all those of an engine."""
