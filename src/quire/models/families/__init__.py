"""Model families: one file each, with its config and its modules."""
