"""`quire plan`: predicts with the real scheduler how to serve a load on this machine."""
