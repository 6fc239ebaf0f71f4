"""Token-mixing layers: Mamba-2, Gated DeltaNet and multi-head latent attention."""
