"""`quire bench`: throughput and perplexity, measured and reported."""
