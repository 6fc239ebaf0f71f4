"""`python -m benchmarks.claims`: what the literature promises of paging, measured here."""
