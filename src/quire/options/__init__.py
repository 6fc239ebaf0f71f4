"""What a user may say: how options are declared, and those of an engine all together."""
