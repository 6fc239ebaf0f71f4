"""Keys, the tenants that they belong to, and what each may use."""
