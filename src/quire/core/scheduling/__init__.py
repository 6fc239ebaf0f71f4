"""Which sequences run in the next step, and how many tokens of each."""
