"""Computes the minimum bytes and operations that a model's steps need.

The sizes of weights are taken from the modules (`models.footprint`), the sizes of K, V and states
from the page layout. With several ranks, all counts are for this rank's shard. Called by
`assembly.rank_build`.
"""

from collections import defaultdict

import torch

from quire.attention.interface import AttentionSpec
from quire.engine.step_work import AttentionWork, ExpertWork, StepWork
from quire.models.footprint import weight_reads
from quire.models.interface import TextModel
from quire.runtime.page_layout import KVCacheLayout

OPERATIONS_PER_WEIGHT = 2
"""One multiplication and one addition."""

OPERATIONS_PER_STATE_ELEMENT = 6
"""An estimate per token: decay, update and read-out each take a multiplication and an addition."""

STATE_BYTES = 4
"""Bytes of a state's element, which is fp32."""


def model_work(model: TextModel, dtype: torch.dtype, layout: KVCacheLayout) -> StepWork:
    """The work of a loaded model of this dtype. `layout` describes this rank's pages; the layers
    of a model that drafts, which follow the model's own, and what the host computes for another
    device are left out."""
    reads = weight_reads(model, dtype)
    kv_bytes: dict[int | None, int] = defaultdict(int)
    pair_operations: dict[int | None, int] = defaultdict(int)
    specs = model.attention_specs[: len(model.attention_specs) - model.num_host_layers]
    for spec, form in zip(specs, layout.formats[: len(specs)], strict=True):
        kv_bytes[spec.window] += form.bytes_per_layer // form.block_size
        pair_operations[spec.window] += _pair_operations(spec)
    state_bytes = sum(spec.num_units * spec.unit_bytes for spec in model.recurrent_specs)
    state_operations = OPERATIONS_PER_STATE_ELEMENT * (state_bytes // STATE_BYTES)
    active_weights = sum(share * weights for share, (_, weights) in reads.experts.items())
    return StepWork(
        layer_bytes=reads.layer_bytes,
        head_bytes=reads.head_bytes,
        token_bytes=reads.row_bytes + sum(kv_bytes.values()),
        state_bytes=2 * state_bytes,
        token_operations=state_operations
        + OPERATIONS_PER_WEIGHT * (reads.layer_weights + round(active_weights)),
        head_operations=OPERATIONS_PER_WEIGHT * reads.head_weights,
        attention=tuple(
            AttentionWork(window, kv_bytes[window], pair_operations[window]) for window in kv_bytes
        ),
        experts=tuple(
            ExpertWork(num_bytes, share) for share, (num_bytes, _) in reads.experts.items()
        ),
    )


def _pair_operations(spec: AttentionSpec) -> int:
    """Operations of all query heads for one pair of query and key: the score and the weighted sum.

    A step's load counts only pairs of a token with itself and with earlier tokens. A layer that
    attends in both directions has about twice as many pairs, so the result is doubled.
    """
    operations = OPERATIONS_PER_WEIGHT * spec.num_heads * (spec.head_dim + spec.output_dim)
    return operations if spec.causal else 2 * operations
