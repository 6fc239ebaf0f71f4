"""`quire bench perplexity`: measures how number formats change next-token distributions."""
