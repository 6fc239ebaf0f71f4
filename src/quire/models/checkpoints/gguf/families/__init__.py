"""Translations of llama.cpp's architectures to the configs and tensors of Hugging Face."""
