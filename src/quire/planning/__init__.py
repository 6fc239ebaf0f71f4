"""`quire plan`: how to serve a load here, by the real scheduler."""
