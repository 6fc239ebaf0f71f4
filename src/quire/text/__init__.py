"""Text on one side, token ids on the other: the floor that knows words and no tensors."""
