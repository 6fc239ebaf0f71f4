"""Recurrent layers (gated delta rule, Mamba-2, short convolution) and their fixed-size states."""
