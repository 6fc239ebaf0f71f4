"""`quire replay`: a recorded load against another configuration, simulated or real"""
