"""`quire bench perplexity`: the quality cost of number formats, by next-token distributions."""
