"""Runs a prompt of fixed token ids to measure the inputs of a model's linears.

Each start measures the same inputs, whatever the number of threads. Called by
`compensated_rounding` and `wide_inputs`.
"""

from collections.abc import Callable, Collection

import torch
from torch import nn

from quire.assembly.format_checks.watched_products import TOKEN_STRIDE, watched_products
from quire.attention.whole_sequence import ExactAttention
from quire.formats.weight_format import LinearModule
from quire.layers.linear import Linear
from quire.models.interface import CausalLM, TextModel

NUM_TOKENS = 128
FIRST_TOKEN = 4096
"""The prompt's token at position p has the id (p + FIRST_TOKEN) * TOKEN_STRIDE, modulo the
vocabulary's size. The weight format check begins at 0, so it tests tokens that this prompt did not
use."""


def linears_outside(
    model: TextModel, modules: tuple[type[nn.Module], ...], accepts: Callable[[Linear], bool]
) -> dict[Linear, str]:
    """The accepted linears that are not within one of these modules, with their paths in the
    model."""
    inside = {
        linear
        for module in model.modules()
        if isinstance(module, modules)
        for linear in module.modules()
    }
    return {
        module: path
        for path, module in model.named_modules()
        if isinstance(module, Linear) and module not in inside and accepts(module)
    }


@torch.inference_mode()
def measure_inputs(
    model: TextModel,
    linears: Collection[Linear],
    max_model_len: int,
    measure: Callable[[Linear, torch.Tensor], torch.Tensor],
) -> dict[Linear, torch.Tensor]:
    """The result of `measure` for each linear that the prompt uses and its first inputs [T, I].

    `max_model_len` limits the prompt's length. The model must have no recurrent layers. All ranks
    that share a model must call this at the same time.
    """
    found: dict[Linear, torch.Tensor] = {}

    def on_product(linear: LinearModule, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if linear not in found:
            assert isinstance(linear, Linear)
            found[linear] = measure(linear, x.reshape(-1, linear.input_size))
        return y

    device = next(model.parameters()).device
    places = torch.arange(min(NUM_TOKENS, max_model_len), device=device)
    token_ids = (places + FIRST_TOKEN) * TOKEN_STRIDE % model.vocab_size
    with watched_products(linears, on_product):
        hidden = model(token_ids, places, ExactAttention(model.attention_specs))
        if isinstance(model, CausalLM):
            model.logits(hidden)
    return found
