"""Releases memory that Python and torch keep after an engine is deleted."""

import gc

import torch


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect garbage, and release the device's unused memory.

    The name is vLLM's. A deleted engine has ended its processes itself, so `shutdown_ray` has no
    effect.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
