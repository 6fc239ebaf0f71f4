"""Models computed by classes of transformers, with quire's KV cache, attention and linears."""
