"""Fakes of a device, a model, adapters and storage tiers, on the virtual clock."""
