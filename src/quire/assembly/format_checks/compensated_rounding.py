"""Rounds weights again when an engine starts, so that rounding errors cancel for a prompt's inputs.

The model is loaded with plain rounding. It reads a prompt of fixed token ids, and the inputs of
each linear are recorded. Then the checkpoint's weights are read a second time, and rounded for
these inputs (`kernels.compensation`). Each start rounds the same weights to the same values,
whatever the number of threads. Applies only to formats with a `CompensatedMethod`.
"""

import time
from collections.abc import Callable, Collection

import torch

from quire.assembly.format_checks.watched_products import TOKEN_STRIDE, watched_products
from quire.attention.whole_sequence import ExactAttention
from quire.formats.rounded import RoundedTorchMethod
from quire.formats.weight_format import CompensatedMethod, LinearModule
from quire.kernels.compensation import error_feedback
from quire.layers.experts import Experts
from quire.layers.linear import Linear
from quire.models.checkpoints.weights_digest import WeightsDigest
from quire.models.interface import CausalLM, TextModel
from quire.observability.log import get_logger

logger = get_logger(__name__)

NUM_TOKENS = 128
FIRST_TOKEN = 4096
"""The prompt's token at position p has the id (p + FIRST_TOKEN) * TOKEN_STRIDE, modulo the
vocabulary's size. The weight format check begins at 0, so it tests tokens that rounding did not
use."""


def compensate_rounding(
    model: TextModel,
    max_model_len: int,
    reload: Callable[[Collection[Linear]], None],
    digest: WeightsDigest | None = None,
) -> None:
    """Round the weights of a loaded model again, if their linear methods can compensate errors.

    `max_model_len` limits the prompt's length. `reload` fills linears
    from the checkpoint, as `loader.load_again` does. `digest`, if given, is updated with the input
    statistics that determine the rounded values. All ranks that share a model must call this at the
    same time.
    """
    paths = _compensable(model)
    if not paths:
        return
    if reason := _why_not(model, paths):
        logger.info("weights are rounded to nearest, without compensation, as %s", reason)
        return
    began_s = time.perf_counter()
    found = _measure_feedback(model, paths, max_model_len)
    for linear, feedback in found.items():
        method = linear.method.storage
        assert isinstance(method, CompensatedMethod)
        method.use_feedback(linear, feedback)
        if digest is not None:
            digest.add(f"feedback of {paths[linear]}", 0, feedback.cpu())
    reload(found.keys())
    logger.info(
        "rounding errors of %d linears are compensated for a prompt's inputs (took %.2f s)",
        len(found),
        time.perf_counter() - began_s,
    )


def _compensable(model: TextModel) -> dict[Linear, str]:
    """Linears whose rounding can be compensated, with their paths in the model.

    Experts are left out, since most of them see few tokens of a prompt.
    """
    experts = {
        linear
        for module in model.modules()
        if isinstance(module, Experts)
        for linear in module.modules()
    }
    found: dict[Linear, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, Linear) and module not in experts:
            method = module.method.storage
            if isinstance(method, CompensatedMethod) and method.can_compensate(module):
                found[module] = path
    return found


def _why_not(model: TextModel, linears: Collection[Linear]) -> str | None:
    devices = {parameter.device.type for parameter in model.parameters()}
    by_torch = any(isinstance(each.method.storage, RoundedTorchMethod) for each in linears)
    if by_torch and devices == {"cpu"}:
        return "no native kernels multiply on the CPU, which would take long"
    return "the model has recurrent layers" if model.recurrent_specs else None


@torch.inference_mode()
def _measure_feedback(
    model: TextModel, linears: Collection[Linear], max_model_len: int
) -> dict[Linear, torch.Tensor]:
    """The error feedback of each linear that the prompt uses, computed from its first inputs."""
    found: dict[Linear, torch.Tensor] = {}

    def measure(linear: LinearModule, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if linear not in found:
            assert isinstance(linear, Linear)
            found[linear] = error_feedback(x.reshape(-1, linear.input_size))
        return y

    device = next(model.parameters()).device
    places = torch.arange(min(NUM_TOKENS, max_model_len), device=device)
    token_ids = (places + FIRST_TOKEN) * TOKEN_STRIDE % model.vocab_size
    with watched_products(linears, measure):
        hidden = model(token_ids, places, ExactAttention(model.attention_specs))
        if isinstance(model, CausalLM):
            model.logits(hidden)
    return found
