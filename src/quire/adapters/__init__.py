"""LoRA adapters: small additions to a model's linears, another for each request."""
