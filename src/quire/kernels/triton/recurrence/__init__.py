"""Triton kernels that move the states of recurrent layers in their pages."""
