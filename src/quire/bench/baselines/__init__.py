"""Managers of KV memory without paging or without shared blocks, as baselines."""
