"""`quire bench perplexity`: what number formats cost in quality, by next-token distributions."""
