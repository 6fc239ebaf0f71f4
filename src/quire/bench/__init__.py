"""`quire bench`: measures throughput and perplexity, and reports the results."""
