"""Layers that mix tokens by recurrent states, or by attention to latents."""
