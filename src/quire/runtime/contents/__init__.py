"""The rotary positions of the tokens of contents, and of the text behind contents."""
