"""`quire replay`: runs a recorded load on another configuration, simulated or real."""
