"""Weight formats: how linears' weights are stored, filled and multiplied."""
