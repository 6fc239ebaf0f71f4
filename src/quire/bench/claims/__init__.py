"""`quire bench claims`: what the literature promises of paging, measured here."""
