"""From logits to token ids: options, noise, choice, log-probabilities."""
