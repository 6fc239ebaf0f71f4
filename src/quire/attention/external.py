"""Refusals, and the write of K and V, that attention backends of third-party packages share.

A kernel of quire norms and rotates q and k and writes K and V; then the package attends. Called by
`flashinfer_paged.py` and `flash_attn3_paged.py`.
"""

import importlib.util

import torch

from quire.attention.interface import AttentionSpec
from quire.errors import ConfigurationError
from quire.kernels.attention_inputs import AttentionInputs

KV_FORMATS = ("bfloat16", "float16")


def check_package(backend: str, module: str, advice: str, *, batch_invariant: bool) -> None:
    """Raises ConfigurationError if the package that has the module is missing, or for
    batch_invariant."""
    if batch_invariant:
        raise ConfigurationError(
            f"attention_backend={backend!r} can't obey batch_invariant=True: how it splits a "
            "context depends on the batch; choose attention_backend='triton'"
        )
    if importlib.util.find_spec(module) is None:
        raise ConfigurationError(
            f"attention_backend={backend!r} needs the package {module}: {advice}, or choose "
            "attention_backend='triton'"
        )


def check_layer(backend: str, spec: AttentionSpec, lacking: str | None) -> None:
    """Raises ConfigurationError if the package can't attend the layer.

    `lacking` names the layer's feature that only this package lacks; None if there is none.
    """
    if spec.has_sinks:
        lacking = "attention sinks"
    elif spec.value_dim is not None:
        lacking = "pages of latent layers"
    elif spec.v_head_dim not in (None, spec.head_dim):
        lacking = "values of another size than keys"
    if lacking is not None:
        raise ConfigurationError(
            f"attention_backend={backend!r} has no {lacking}, which this model needs; "
            "choose attention_backend='triton'"
        )


def rotate_into_pages(
    inputs: AttentionInputs, pages: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Write K and V into pages [N, 2, Hkv, B, D], and return q, normed, rotated and contiguous."""
    # Imported here because it imports Triton.
    from quire.kernels.triton.attention.quantized_kv import KVPages
    from quire.kernels.triton.attention.rotary_kv_write import rotate_and_write

    q, k, v, sinks, rotation = inputs
    assert sinks is None and q.dtype == pages.dtype
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rotate_and_write(q, k, v, rotation, KVPages(pages), slots, out=out)
    return out
