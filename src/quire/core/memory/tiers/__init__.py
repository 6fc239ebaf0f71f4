"""Memory tiers behind the KV blocks: stores cached contents elsewhere and loads them back."""
