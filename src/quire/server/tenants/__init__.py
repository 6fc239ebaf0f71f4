"""API keys, the tenants that they belong to, and the bounds of each tenant."""
