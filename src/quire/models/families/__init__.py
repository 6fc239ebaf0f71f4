"""One file a model family: its config and its modules."""
