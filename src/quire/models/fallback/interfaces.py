"""The attention and expert functions that models of the transformers library call.

A model's config selects the functions by name. `ATTENDING` holds the attention call of the running
step; `model.py` sets it around a forward pass. The call is not passed as an argument, because many
model classes drop extra arguments.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from quire.attention.interface import AttentionCall, AttentionSpec, filled_up
from quire.kernels.attention_inputs import AttentionInputs
from quire.models.fallback.hf_classes import ATTENTION
from quire.models.interface import InputEmbeds


@dataclass(slots=True)
class StepAttention:
    """The attention of one forward pass."""

    call: AttentionCall
    specs: tuple[AttentionSpec, ...]
    #: [T] token ids.
    token_ids: torch.Tensor
    #: [T] positions.
    positions: torch.Tensor
    #: None once the embedding of token ids has put them in their places.
    input_embeds: InputEmbeds | None = None
    #: Number of attention layers called so far, which is the index of the next layer to be called.
    num_called: int = 0


class _Attending:
    """Holds the `StepAttention` of the current context, for attention functions and layers."""

    def __init__(self) -> None:
        self._step: ContextVar[StepAttention] = ContextVar("_step")
        self._has_numbers: ContextVar[bool] = ContextVar("_has_numbers", default=True)

    @property
    def step(self) -> StepAttention:
        return self._step.get()

    def take_embeds(self) -> InputEmbeds | None:
        """The step's `input_embeds`, which the caller puts in their places."""
        step = self._step.get(None)
        if step is None:
            return None
        embeds, step.input_embeds = step.input_embeds, None
        return embeds

    @property
    def has_numbers(self) -> bool:
        """Whether tensors have values; False while a model runs on the meta device."""
        return self._has_numbers.get()

    def given(self, batch: torch.Tensor) -> torch.Tensor:
        """The step's own token ids or positions [T] if `batch` [1, T] is a view of them, else
        `batch` flattened. `kernels.cpu.recorder` recognizes only the step's own tensors."""
        step = self._step.get(None)
        for own in () if step is None else (step.token_ids, step.positions):
            if own.data_ptr() == batch.data_ptr() and len(own) == batch.numel():
                return own
        return batch.flatten()

    @contextmanager
    def to(self, step: StepAttention) -> Iterator[None]:
        token = self._step.set(step)
        try:
            yield
        finally:
            self._step.reset(token)

    @contextmanager
    def without_numbers(self) -> Iterator[None]:
        token = self._has_numbers.set(False)
        try:
            yield
        finally:
            self._has_numbers.reset(token)


ATTENDING = _Attending()


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function for transformers: query [1, Hq, T, D], key [1, Hkv, T, D] and value
    [1, Hkv, T, Dv] -> [1, T, Hq, Dv].

    Heads that are narrower than the KV cache's heads are padded with zeros, which don't change q·k.
    """
    step = ATTENDING.step
    layer = step.num_called
    step.num_called = layer + 1
    head_dim, value_dim = step.specs[layer].head_dim, value.shape[3]
    q, k, v = (_rows(part, head_dim) for part in (query, key, value))
    out = step.call(layer, AttentionInputs(q, k, v, kwargs.get("s_aux")))
    return out[None] if value_dim == head_dim else out[None, ..., :value_dim], None


def _rows(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """x [1, heads, T, at most head_dim] -> [T, heads, head_dim]."""
    return filled_up(x[0].transpose(0, 1), head_dim)


def run_experts(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """An experts function for transformers: loops over the chosen experts in ascending order.

    hidden [T, H], top_k_index and top_k_weights [T, K] -> [T, H].
    """
    if not ATTENDING.has_numbers:
        return torch.empty_like(hidden)
    total = torch.zeros_like(hidden)
    experts = module.expert_linears
    for expert in torch.unique(top_k_index).tolist():
        if expert >= len(experts):  # routers use such an index for no expert
            continue
        rows, places = torch.where(top_k_index == expert)
        out = experts(module, expert, hidden[rows]) * top_k_weights[rows, places, None]
        total.index_add_(0, rows, out.to(total.dtype))
    return total


def register_functions(
    name: str = ATTENTION,
    attention: Callable[..., Any] = attend,
    mask: Callable[..., Any] | None = None,
) -> None:
    """Register the functions with transformers. If `mask` is None, no masks are made."""
    # transformers is not always installed.
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ExpertsInterface

    AttentionInterface.register(name, attention)
    ExpertsInterface.register(ATTENTION, run_experts)
    if mask is not None:
        AttentionMaskInterface.register(name, mask)
