"""What would be built, and what it would take, without building it."""
