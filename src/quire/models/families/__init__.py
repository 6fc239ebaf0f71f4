"""Model families, each in a file with its config and modules."""
