"""Contents of prompts in the runner: their embeddings, and the rotary positions of tokens."""
