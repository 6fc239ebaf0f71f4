"""Mixtures of experts beside a plain read of the experts that are used.

    python -m benchmarks.cpu.experts [--layouts bf16,int8,int4] [--rows 1,48] [--turns 20]
    python -m benchmarks.cpu.experts --model MODEL [--layouts ...] [--rows ...]

Without a model, one layer's experts are multiplied, of Qwen3-30B-A3B's shape (hidden size 2,048,
128 experts of 768, 8 for each token), with random weights and a random choice for each call. With
a model, an engine decodes sequences, and a step also reads all other weights.

A step needs the bytes of the *distinct* experts that its rows chose, once. Each turn reads a large
array, computes, and reads it again; the share of the floor is the median over turns of: seconds
that the bytes take at the bandwidth read before and after, over the seconds that the step took. Of
an engine's crowd the number of distinct experts is that of a uniform choice: E (1 - (1 - K/E)^T).

Shapes: T rows, E experts, K experts of a row.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from ctypes import byref
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.cpu.floors import PRECISIONS
from benchmarks.cpu.one_stream import READ_BYTES, read_bytes_s
from quire import LLM, SamplingParams
from quire.bench.machine import NoiseMeter, processor
from quire.kernels.activations import Gating
from quire.kernels.cpu.abi import DType, WeightLayout
from quire.kernels.cpu.library import NativeKernels, load_library
from quire.kernels.cpu.linear import PackedLinear
from quire.kernels.cpu.mixture import PackedExperts
from quire.models.config import DecoderConfig
from quire.models.registry import load_config
from quire.offline.branch_handle import BranchHandle

HIDDEN, NUM_EXPERTS, INNER, TOP_K = 2048, 128, 768, 8
LAYOUTS = {
    "bf16": (WeightLayout.DENSE_BF16, 0),
    "int8": (WeightLayout.INT8, 0),
    "int4": (WeightLayout.INT4, 32),
}
PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds of a step, bytes that it had to read, and the bandwidth meanwhile."""

    took_s: float
    num_bytes: float
    read_bytes_s: float

    @property
    def share(self) -> float:
        """The floor of the time, as a share of the measured time."""
        return self.num_bytes / self.read_bytes_s / self.took_s


def in_turns(step: Callable[[], float], num_turns: int, steps_per_turn: int) -> list[Turn]:
    """step: returns the bytes that it had to read."""
    numbers = torch.ones(READ_BYTES // 4, dtype=torch.int32)
    step()
    turns, before = [], read_bytes_s(numbers)
    for _ in range(num_turns):
        started_s = time.perf_counter()
        num_bytes = sum(step() for _ in range(steps_per_turn))
        took_s = time.perf_counter() - started_s
        after = read_bytes_s(numbers)
        turns.append(
            Turn(took_s / steps_per_turn, num_bytes / steps_per_turn, (before + after) / 2)
        )
        before = after
    return turns


def line(what: str, turns: Sequence[Turn], num_rows: int, others: float) -> str:
    """The line to print for a measurement."""
    took_s = statistics.median(turn.took_s for turn in turns)
    shares = sorted(turn.share for turn in turns)
    rate = statistics.median(turn.num_bytes / turn.took_s for turn in turns)
    read = statistics.median(turn.read_bytes_s for turn in turns)
    return (
        f"{what}, {num_rows} rows: {took_s * 1e3:.2f} ms, {num_rows / took_s:.1f} rows/s,"
        f" {rate / 1e9:.1f} GB/s of experts beside {read / 1e9:.1f} read;"
        f" {statistics.median(shares):.0%} of the floor ({shares[0]:.0%} to {shares[-1]:.0%});"
        f" others took {others:.2f} cores"
    )


def make_layer(layout: str) -> tuple[PackedExperts, float]:
    """A layer's experts, and the bytes of one."""
    kind, group_size = LAYOUTS[layout]

    def make(num_outputs: int, num_inputs: int, interleave: int) -> PackedLinear:
        linear = PackedLinear(
            kind, num_outputs, num_inputs, group_size=group_size, interleave=interleave
        )
        linear.pack(torch.randn(num_outputs, num_inputs).mul_(0.02).bfloat16(), 0)
        return linear

    gate_up = [make(2 * INNER, HIDDEN, INNER) for _ in range(NUM_EXPERTS)]
    down = [make(HIDDEN, INNER, 0) for _ in range(NUM_EXPERTS)]
    num_bytes = gate_up[0].num_bytes + down[0].num_bytes
    return PackedExperts(gate_up, down, Gating(), TOP_K), num_bytes


def measure_layer(kernels: NativeKernels, layout: str, rows: Sequence[int], num_turns: int) -> None:
    layer, expert_bytes = make_layer(layout)
    for num_rows in rows:
        x = torch.randn(num_rows, HIDDEN).bfloat16()
        out = torch.empty_like(x)
        num_choices = max(4, 64 // num_rows)
        ids = torch.rand(num_choices, num_rows, NUM_EXPERTS).topk(TOP_K).indices
        num_distinct = sum(len(each.unique()) for each in ids)
        weights = torch.rand(num_choices, num_rows, TOP_K)
        choices = torch.cat((ids.int().view(torch.float32), weights), dim=2)

        def step(
            x: torch.Tensor = x,
            out: torch.Tensor = out,
            choices: torch.Tensor = choices,
            num_distinct: int = num_distinct,
        ) -> float:
            """All choices one after the other, without Python's checks between them."""
            for words in choices:
                kernels.library.experts(
                    kernels.context,
                    byref(layer.struct),
                    DType.BF16,
                    x.data_ptr(),
                    HIDDEN,
                    words.data_ptr(),
                    2 * TOP_K,
                    len(x),
                    out.data_ptr(),
                    HIDDEN,
                )
            return num_distinct * expert_bytes

        meter = NoiseMeter()
        turns = in_turns(step, num_turns, 1)
        turns = [
            Turn(turn.took_s / num_choices, turn.num_bytes / num_choices, turn.read_bytes_s)
            for turn in turns
        ]
        print(line(f"a layer's experts, {layout}", turns, num_rows, meter.stop().other_cores or 0))


def step_bytes(config: DecoderConfig, precision: str, num_rows: int) -> float:
    """The bytes that a decode step of num_rows rows has to read, without K and V."""
    stored = PRECISIONS[precision]
    num_weights, num_routers = 0.0, 0.0
    for layer in range(config.num_layers):
        heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
        num_weights += config.hidden_size * heads
        mixture = config.mixture_of(layer)
        if mixture is None:
            num_weights += config.num_mlp_weights(layer)
            continue
        num_experts = mixture.router.num_experts
        missed = (1 - mixture.router.top_k / num_experts) ** num_rows
        inner = num_experts * (1 - missed) * mixture.intermediate_size + mixture.shared_size
        num_weights += 3 * config.hidden_size * inner
        num_routers += config.hidden_size * num_experts
    head = config.vocab_size * config.hidden_size * stored.head_bytes
    return num_weights * stored.layer_bytes + num_routers * 2 + head


def measure_engine(folder: Path, precision: str, rows: Sequence[int], num_turns: int) -> None:
    config = load_config(folder)
    assert isinstance(config, DecoderConfig)
    llm = LLM(
        model=str(folder),
        quantization=None if precision == "bf16" else precision,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=max(rows),
    )
    for num_rows in rows:
        tokens = 4
        params = SamplingParams(
            temperature=0, max_tokens=tokens * (num_turns + 2) + num_rows + 8, ignore_eos=True
        )
        num_bytes = step_bytes(config, precision, num_rows)
        with ExitStack() as stack:
            rows_under_way = [
                stack.enter_context(llm.start(make_prompt(row), params)) for row in range(num_rows)
            ]

            def step(
                first: BranchHandle = rows_under_way[0], num_bytes: float = num_bytes
            ) -> float:
                first.step()  # of all rows
                return num_bytes

            for _ in range(4):
                step()
            meter = NoiseMeter()
            turns = in_turns(step, num_turns, tokens)
            others = meter.stop().other_cores or 0
            print(line(f"{folder.name}, {precision}", turns, num_rows, others), flush=True)


def make_prompt(row: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [3 + (31 * row + 7 * i) % 1000 for i in range(PROMPT_TOKENS)]}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layouts", default="bf16,int8,int4")
    parser.add_argument("--rows", default="1,48")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--model", type=Path, help="a folder; without it, one layer")
    args = parser.parse_args(words)
    print(processor(), flush=True)
    rows = [int(word) for word in args.rows.split(",")]
    kernels = NativeKernels(load_library())
    for layout in args.layouts.split(","):
        if args.model is None:
            measure_layer(kernels, layout, rows, args.turns)
        else:
            measure_engine(args.model, layout, rows, args.turns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
