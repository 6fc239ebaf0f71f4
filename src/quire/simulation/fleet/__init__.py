"""Fleets of simulated replicas behind the real router, on one virtual clock"""
