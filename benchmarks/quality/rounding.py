"""Simulates the cost of rounded activations and weights in quality, on a real model.

    ./scripts/models
    python -m benchmarks.quality.rounding --windows 2 --window-tokens 256

transformers computes the model in fp32, and each linear rounds what it multiplies: activations to
int8 with a scale for each 32, 64, 128 or 256 inputs beside exact weights, or weights to int4, as
they are and after a rotation of their inputs. Prints the mean divergence from the model without
rounding over each window's second half, in nats, and the change of perplexity.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.real_weights import MODELS

from benchmarks.quality.block_quantized import windows
from quire.attention.kv_rounding import divergence
from quire.kernels.quantize import quantize_groups, quantize_int4, rotate_blocks, rotation_size

SIZES = (32, 64, 128, 256)
INT4_GROUP = 32

Rounding = Callable[[torch.Tensor], torch.Tensor]
"""Numbers [N, I] fp32 -> the rounded ones."""


def round_groups(x: torch.Tensor, size: int) -> torch.Tensor:
    """x [N, I] in int8 with a scale for each `size` inputs."""
    levels, scales = quantize_groups(x, size)
    return (levels * scales[..., None]).flatten(1)[:, : x.shape[1]]


def round_int4(weight: torch.Tensor) -> torch.Tensor:
    """weight [O, I] in the int4 format."""
    return quantize_int4(weight, INT4_GROUP).dequantized().flatten(1)[:, : weight.shape[1]]


def round_rotated(weight: torch.Tensor) -> torch.Tensor:
    """weight [O, I] in the int4 format of rotated inputs, rotated back."""
    size = rotation_size(weight.shape[1])
    return rotate_blocks(round_int4(rotate_blocks(weight, size) / size), size)


ACTIVATIONS: dict[str, Rounding] = {
    f"activations int8, a scale for {size}": partial(round_groups, size=size) for size in SIZES
}
WEIGHTS: dict[str, Rounding] = {
    "weights int4": round_int4,
    "weights int4, rotated": round_rotated,
}


@contextmanager
def rounded_activations(model: torch.nn.Module, rounding: Rounding) -> Iterator[None]:
    """Let each linear of the model round its input."""

    def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        (x,) = inputs
        return rounding(x.flatten(0, -2)).view(x.shape)

    linears = [each for each in model.modules() if isinstance(each, torch.nn.Linear)]
    handles = [each.register_forward_pre_hook(hook) for each in linears]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def rounded_weights(model: torch.nn.Module, rounding: Rounding) -> Iterator[None]:
    """Let each linear but the vocabulary projection round its weight."""
    linears = {
        name: each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)
    }
    linears.pop("lm_head", None)
    exact = {name: each.weight.data for name, each in linears.items()}
    try:
        for name, each in linears.items():
            each.weight.data = rounding(exact[name])
        yield
    finally:
        for name, each in linears.items():
            each.weight.data = exact[name]


@torch.inference_mode()
def predict(model: Any, given: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Log-probabilities [positions, V] of the tokens in each window's second half."""
    found = []
    for window in given:
        logits = model(torch.tensor([list(window)])).logits[0, len(window) // 2 - 1 : -1]
        found.append(torch.log_softmax(logits, dim=-1))
    return found


def loss(found: Sequence[torch.Tensor], given: Sequence[Sequence[int]]) -> float:
    """Mean negative log-likelihood of the predicted tokens, in nats."""
    losses = [
        -each.gather(1, torch.tensor(list(window[len(window) // 2 :]))[:, None])
        for each, window in zip(found, given, strict=True)
    ]
    return torch.cat(losses).mean().item()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = MODELS / "smollm2-135m-instruct"
    parser.add_argument("--model", type=Path, default=default, help="folder of a model")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--window-tokens", type=int, default=256)
    args = parser.parse_args(argv)
    from transformers import AutoModelForCausalLM  # slow to load

    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    given = [list(each.token_ids) for each in windows(args.model, args.windows, args.window_tokens)]
    exact = predict(model, given)
    exact_loss = loss(exact, given)
    for context, roundings in ((rounded_activations, ACTIVATIONS), (rounded_weights, WEIGHTS)):
        for name, rounding in roundings.items():
            with context(model, rounding):
                found = predict(model, given)
            pairs = zip(exact, found, strict=True)
            moved = torch.cat([divergence(*pair) for pair in pairs]).mean().item()
            change = math.exp(loss(found, given) - exact_loss) - 1
            print(f"{name:34} KLD {moved:.4f}  perplexity {change:+.2%}", flush=True)


if __name__ == "__main__":
    main()
