"""How llama.cpp's architectures hold the config and the weights of Hugging Face's."""
