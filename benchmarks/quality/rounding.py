"""Simulates the cost of rounded activations and weights in quality, on a real model.

    ./scripts/models
    python -m benchmarks.quality.rounding --windows 2 --window-tokens 256

transformers computes the model in fp32, and each linear rounds what it multiplies: activations to
int8 with a scale for each 32, 64, 128 or 256 inputs, weights to int8 or int4, or both, after a
rotation of their inputs or without it. Errors of weights are compensated for the inputs of a prompt
in some rows (`kernels.compensation`). The row "int8" is quire's int8, and has two parts:
"activations int8, rotated, a scale for 256" and "weights int8, compensated".

With --bfloat16, modules also round their outputs to bfloat16, in the model that rows are compared
with, too. The row "noise" then has the cost of any other exact computation in bfloat16: it changes
activations by less than bfloat16 can store, and these changes decide how later sums are rounded.

Prints the mean divergence from the model without the row's rounding over each window's second half,
in nats, the change of perplexity, and how often the likeliest token is the same.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.real_weights import MODELS

from benchmarks.quality.block_quantized import windows
from quire.assembly.format_checks.calibration_prompt import FIRST_TOKEN, NUM_TOKENS
from quire.assembly.format_checks.watched_products import TOKEN_STRIDE
from quire.attention.kv_rounding import divergence
from quire.kernels.compensation import BLOCK, compensate_int8, error_feedback
from quire.kernels.quantize import (
    INT4_LEVELS,
    INT8_GROUP,
    quantize_groups,
    quantize_int4,
    quantize_int8_weight,
    rotate_blocks,
    rotation_size,
)

SIZES = (32, 64, 128, 256)
INT4_GROUP = 32
NOISE = 2.0**-14
"""The largest relative change by the row "noise". A step of bfloat16 is 2^-8 or 2^-7."""

Rounding = Callable[[torch.Tensor], torch.Tensor]
"""Numbers [N, I] fp32 -> the rounded ones."""

WeightRounding = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A weight [O, I] and some inputs [T, I] of its linear, fp32 -> the rounded weight."""


def round_groups(x: torch.Tensor, size: int) -> torch.Tensor:
    """x [N, I] in int8 with a scale for each `size` inputs."""
    levels, scales = quantize_groups(x, size)
    return (levels * scales[..., None]).flatten(1)[:, : x.shape[1]]


def round_rotated_groups(x: torch.Tensor, size: int) -> torch.Tensor:
    """x [N, I] in int8 with a scale for each `size` inputs, after a rotation, which is undone."""
    rotation = rotation_size(x.shape[1])
    return rotate_blocks(round_groups(rotate_blocks(x, rotation), size), rotation) / rotation


def add_noise(x: torch.Tensor) -> torch.Tensor:
    """x [N, I], changed by less than a step of bfloat16."""
    random = torch.rand(x.shape, generator=torch.Generator().manual_seed(len(x)))
    return x * (1 + NOISE * random)


def round_int8(weight: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """weight [O, I], rotated and rounded to the nearest levels of int8."""
    levels, scales = quantize_int8_weight(weight)
    return rotate_blocks(levels * scales[:, None], rotation_size(weight.shape[1]))


def compensated_int8(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """weight [O, I] as quire's int8 rounds it, so that errors cancel for the inputs x."""
    levels, scales = compensate_int8(weight, error_feedback(x))
    return rotate_blocks(levels * scales[:, None], BLOCK)


def compensated_int8_blocks(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """weight [O, I] like `compensated_int8`, but with a scale for each output and 64 inputs."""
    feedback = error_feedback(x)
    blocks = [
        compensate_int8(block, feedback[index : index + 1])
        for index, block in enumerate(weight.split(BLOCK, dim=1))
    ]
    return rotate_blocks(
        torch.cat([levels * scales[:, None] for levels, scales in blocks], 1), BLOCK
    )


def round_int4(weight: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """weight [O, I] in the int4 format."""
    return quantize_int4(weight, INT4_GROUP).dequantized().flatten(1)[:, : weight.shape[1]]


def compensated_int4(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """weight [O, I] in the int4 format, so that errors cancel for the inputs x in blocks of 64.

    Scales and offsets are those of `round_int4`, since they are chosen before levels are.
    """
    rows = quantize_int4(weight, INT4_GROUP)
    scales, offsets = (
        (values.float() * factors[:, None]).repeat_interleave(INT4_GROUP, 1)
        for values, factors in (
            (rows.scales, rows.scale_factors),
            (rows.offsets, rows.offset_factors),
        )
    )
    # error_feedback rotates its inputs. For inputs that are rotated already, it finds the feedback
    # of the inputs themselves, times a power of two that cancels.
    feedback = error_feedback(rotate_blocks(x, BLOCK))
    blocks, scales, offsets = (
        each.view(len(weight), -1, BLOCK).permute(2, 1, 0).contiguous()
        for each in (weight, scales, offsets)
    )
    for j in range(BLOCK):
        levels = ((blocks[j] + offsets[j]) / scales[j].clamp(min=1e-30)).round()
        rounded = levels.clamp(0, INT4_LEVELS) * scales[j] - offsets[j]
        blocks[j + 1 :] -= feedback[:, j, j + 1 :].T[..., None] * (blocks[j] - rounded)
        blocks[j] = rounded
    return blocks.permute(2, 1, 0).reshape(weight.shape)


def round_rotated(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """weight [O, I] in the int4 format of rotated inputs, rotated back."""
    size = rotation_size(weight.shape[1])
    return rotate_blocks(round_int4(rotate_blocks(weight, size) / size, x), size)


@dataclass(frozen=True, slots=True)
class Row:
    """How a row of the output rounds activations and weights. None means that they are exact."""

    activations: Rounding | None = None
    weights: WeightRounding | None = None


def rotated(size: int) -> Rounding:
    """The rounding of activations that `round_rotated_groups` computes."""
    return partial(round_rotated_groups, size=size)


ROWS = (
    {
        f"activations int8, a scale for {size}": Row(partial(round_groups, size=size))
        for size in SIZES
    }
    | {f"activations int8, rotated, a scale for {size}": Row(rotated(size)) for size in SIZES}
    | {
        "weights int8": Row(weights=round_int8),
        "weights int8, compensated": Row(weights=compensated_int8),
        "weights int8, compensated, a scale for 64": Row(weights=compensated_int8_blocks),
        "weights int4": Row(weights=round_int4),
        "weights int4, compensated": Row(weights=compensated_int4),
        "weights int4, rotated": Row(weights=round_rotated),
        "int8": Row(rotated(INT8_GROUP), compensated_int8),
        "int8, activations with a scale for 64": Row(rotated(64), compensated_int8),
        "int8, scales for 32 and for 64": Row(rotated(32), compensated_int8_blocks),
        "noise": Row(add_noise),
    }
)


@contextmanager
def bfloat16_outputs(model: torch.nn.Module) -> Iterator[None]:
    """Let modules round their outputs to bfloat16, and continue with them in fp32."""

    def hook(module: torch.nn.Module, inputs: object, output: object) -> object:
        return output.bfloat16().float() if isinstance(output, torch.Tensor) else output

    handles = [each.register_forward_hook(hook) for each in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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
def rounded_weights(
    model: torch.nn.Module, rounding: WeightRounding, inputs: Mapping[str, torch.Tensor]
) -> Iterator[None]:
    """Let each linear that has `inputs`, by name, round its weight for them."""
    linears = {name: model.get_submodule(name) for name in inputs}
    exact = {name: each.weight.data for name, each in linears.items()}
    try:
        for name, each in linears.items():
            each.weight.data = rounding(exact[name], inputs[name])
        yield
    finally:
        for name, each in linears.items():
            each.weight.data = exact[name]


@contextmanager
def rounded(model: torch.nn.Module, row: Row, inputs: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let linears round what the row rounds. `inputs` are those that weights are rounded for."""
    with ExitStack() as roundings:
        if row.activations is not None:
            roundings.enter_context(rounded_activations(model, row.activations))
        if row.weights is not None:
            roundings.enter_context(rounded_weights(model, row.weights, inputs))
        yield


@torch.no_grad()
def linear_inputs(model: torch.nn.Module, given: torch.Tensor) -> dict[str, torch.Tensor]:
    """The inputs [T, I] of each linear but the vocabulary projection, if the model gets `given`."""
    found: dict[str, torch.Tensor] = {}

    def keeping(name: str) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], None]:
        return lambda _, inputs: found.update({name: inputs[0].flatten(0, -2)})

    handles = [
        each.register_forward_pre_hook(keeping(name))
        for name, each in model.named_modules()
        if isinstance(each, torch.nn.Linear) and name != "lm_head"
    ]
    try:
        model(given)
    finally:
        for handle in handles:
            handle.remove()
    return found


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
    parser.add_argument("--bfloat16", action="store_true", help="round outputs to bfloat16, too")
    parser.add_argument("rows", nargs="*", metavar="ROW", help="names of rows; without any, all")
    args = parser.parse_args(argv)
    from transformers import AutoModelForCausalLM  # slow to load

    # First, load the model, and record the inputs that its weights are rounded for.
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    given = [list(each.token_ids) for each in windows(args.model, args.windows, args.window_tokens)]
    # The prompt that quire computes when it starts.
    token_ids = (torch.arange(NUM_TOKENS) + FIRST_TOKEN) * TOKEN_STRIDE % model.config.vocab_size
    inputs = linear_inputs(model, token_ids[None])
    # Then measure each row. Logits stay in fp32, as in quire.
    with bfloat16_outputs(model.base_model) if args.bfloat16 else nullcontext():
        exact = predict(model, given)
        exact_loss = loss(exact, given)
        for name in args.rows or ROWS:
            with rounded(model, ROWS[name], inputs):
                found = predict(model, given)
            pairs = zip(exact, found, strict=True)
            moved = torch.cat([divergence(*pair) for pair in pairs]).mean().item()
            change = math.exp(loss(found, given) - exact_loss) - 1
            tops = [torch.cat([each.argmax(-1) for each in side]) for side in (exact, found)]
            same = (tops[0] == tops[1]).float().mean().item()
            print(
                f"{name:44} KLD {moved:.5f}  perplexity {change:+.2%}  top-1 {same:.2%}", flush=True
            )


if __name__ == "__main__":
    main()
