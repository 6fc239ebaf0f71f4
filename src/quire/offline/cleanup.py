"""Memory that a deleted engine leaves to Python and torch, given back."""

import gc

import torch


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect garbage, and give the device's unused memory back. vLLM's name: an engine that was
    deleted has ended its processes by itself, and none of them is Ray's."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
