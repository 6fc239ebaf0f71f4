"""`quire plan`: predicts with the real engine how to serve a load on this machine."""
