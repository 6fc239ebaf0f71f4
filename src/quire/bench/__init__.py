"""`quire bench`: throughput, memory and perplexity, measured and reported."""
