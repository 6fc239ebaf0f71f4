"""Layers that mix tokens in other ways than plain attention: through states, or through latents."""
