"""Triton kernels that update the states of recurrent layers in their pages."""
