"""All options of an engine, joined from those that its components declare."""
