"""Weight formats: how weights of linears are stored, loaded and multiplied."""
