"""Simulates fleets of replicas behind the real router, on one virtual clock."""
