"""`quire doctor`: reports a machine's or model's properties, problems, and advice."""
