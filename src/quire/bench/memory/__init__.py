"""`quire bench memory`: what paging is worth, measured against what it replaced."""
