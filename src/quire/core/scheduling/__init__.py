"""The scheduler: chooses the sequences of each step, and the number of tokens of each."""
