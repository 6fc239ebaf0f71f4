"""LoRA adapters: small additions to a model's linears, chosen for each request."""
