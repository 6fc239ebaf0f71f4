"""Quantized K and V on the CPU: an engine with int8 pages and one with the model's dtype, in turns.

    python -m benchmarks.cpu.quantized_kv --model llama-160m --cases 1x32768,16x8192,1x256,16x512 \\
        --prompts 512,2048 --rounds 5

Both engines live in one process and share nothing but the file of weights; they take turns, some
steps each, and the medians over the turns are compared. Decoding: contexts are random numbers in
blocks that lie anywhere, the runner executes plans as from the scheduler. Prefill: a prompt and its
first token. The floor of decoding is the bytes of weights, K, V and scales that a step must read,
over the bandwidth that was measured in the same run.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from benchmarks.cpu.floors import PRECISIONS, ModelShape
from benchmarks.cpu.roofline import read_bytes_s
from quire.bench.machine import NoiseMeter

if TYPE_CHECKING:
    from quire import LLM
    from quire.runtime.model_runner import ModelRunner

BLOCK_SIZE = 16
SEED = 904
FORMATS = ("auto", "int8")
WARM_UP_STEPS = 2

# As halves of a bfloat16 such bytes are a number from 2^-11 to 0.2, as codes of int8 they differ.
LEAST_BYTE, MOST_BYTE = 0x3A, 0x3E

DECODE_HEADER = (
    "  decode           auto ms    int8 ms   ratio   floor auto   floor int8   of the floors"
    "   ratio of floors"
)
PREFILL_HEADER = "  prompt           auto ms    int8 ms   ratio"


@dataclass(frozen=True, slots=True)
class Case:
    """num_seqs sequences, each with `context` tokens before those that are decoded."""

    num_seqs: int
    context: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        num_seqs, _, context = text.partition("x")
        return cls(int(num_seqs), int(context))


class Side:
    """An engine with one KV format."""

    def __init__(self, llm: "LLM", shape: ModelShape) -> None:
        # An offline engine has no public way to begin in the middle of a sequence.
        self._llm = llm
        self._runner = cast("ModelRunner", llm.engine._runner)
        storage = self._runner._kv_cache.storage
        self.token_bytes = storage.shape[1] / BLOCK_SIZE
        weights = PRECISIONS["bf16"]
        self._weight_bytes = (
            shape.layer_weights * weights.layer_bytes + shape.head_weights * weights.head_bytes
        )
        self._num_filled = self._num_seqs = self._num_steps = 0

    def start(self, case: Case, num_steps: int) -> None:
        """Fill the contexts, with room for num_steps steps after them."""
        from quire.core.sampling_params import DecodingParams
        from quire.core.step import RowAdmission

        num_blocks = -(-(case.context + num_steps + 1) // BLOCK_SIZE)
        self._fill(case.num_seqs * num_blocks)
        generator = np.random.default_rng(SEED)
        blocks = generator.permutation(case.num_seqs * num_blocks).reshape(case.num_seqs, -1)
        prompts = generator.integers(3, 1000, (case.num_seqs, case.context + 1)).tolist()
        admit = tuple(
            RowAdmission(
                row=index,
                token_ids=prompts[index],
                num_prompt_tokens=case.context,
                num_computed_tokens=case.context,
                block_tables=(tuple(blocks[index].tolist()),),
                params=DecodingParams(max_tokens=num_steps + 1, temperature=0.0),
            )
            for index in range(case.num_seqs)
        )
        self._num_seqs, self._num_steps = case.num_seqs, 0
        self._execute(admit=admit)

    def _fill(self, num_blocks: int) -> None:
        storage = self._runner._kv_cache.storage
        for block in range(self._num_filled, num_blocks):
            storage[block].random_(LEAST_BYTE, MOST_BYTE + 1)
        self._num_filled = max(self._num_filled, num_blocks)

    def step(self) -> None:
        """One decode step."""
        self._execute()

    def end(self) -> None:
        """Forget the sequences."""
        self._runner.reset()

    def _execute(self, **changes: Any) -> None:
        from quire.core.step import StepPlan

        plan = StepPlan(
            step_id=self._num_steps, num_rows=self._num_seqs, num_tokens=self._num_seqs, **changes
        )
        self._num_steps += 1
        self._runner.execute(plan)
        self._runner.sample()
        self._runner.result()

    def prefill(self, prompt: list[int]) -> None:
        """Compute a prompt and one token."""
        from quire.core.sampling_params import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        self._llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)

    def step_bytes(self, case: Case) -> float:
        """That a decode step must read."""
        return self._weight_bytes + case.num_seqs * case.context * self.token_bytes


def timed_s(run: Callable[[], None], count: int) -> float:
    """The mean seconds of `count` calls."""
    started_s = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - started_s) / count


def decode(sides: list[Side], case: Case, rounds: int, steps: int) -> list[float]:
    """Median seconds of a step, by side."""
    times: list[list[float]] = [[] for _ in sides]
    for side in sides:
        side.start(case, rounds * (steps + WARM_UP_STEPS) + 1)
    for index in range(rounds):
        turn = list(zip(sides, times, strict=True))
        for side, found in turn if index % 2 == 0 else turn[::-1]:
            timed_s(side.step, WARM_UP_STEPS)
            found.append(timed_s(side.step, steps))
    for side in sides:
        side.end()
    return [statistics.median(found) for found in times]


def prefill(sides: list[Side], num_tokens: int, rounds: int) -> list[float]:
    """Median seconds of a prompt, by side."""
    times: list[list[float]] = [[] for _ in sides]
    generator = np.random.default_rng(SEED)
    for index in range(rounds + 1):
        prompt = generator.integers(3, 1000, num_tokens).tolist()
        turn = list(zip(sides, times, strict=True))
        for side, found in turn if index % 2 == 0 else turn[::-1]:
            found.append(timed_s(lambda: side.prefill(prompt), 1))  # noqa: B023 (called at once)
    return [statistics.median(found[1:]) for found in times]


@contextmanager
def raised_model(source: Path, num_positions: int) -> Iterator[Path]:
    """The model in a temporary folder, with a config that allows at least num_positions."""
    with TemporaryDirectory(prefix="quantized-kv-") as name:
        target = Path(name)
        for path in source.iterdir():
            if path.name != "config.json":
                (target / path.name).symlink_to(path.resolve())
        config = json.loads((source / "config.json").read_text())
        known = config["max_position_embeddings"]
        config["max_position_embeddings"] = max(known, num_positions)
        (target / "config.json").write_text(json.dumps(config))
        yield target


def open_sides(args: argparse.Namespace, folder: Path, longest: int) -> list[Side]:
    """The engines, plain pages first."""
    from quire import LLM  # after the number of threads is fixed

    num_rows = max([case.num_seqs for case in args.cases], default=1)
    tokens = [case.num_seqs * (case.context + args.margin) for case in args.cases]
    num_blocks = -(-max([*tokens, longest + args.margin]) // BLOCK_SIZE) + num_rows
    shape = ModelShape.from_folder(folder)
    return [
        Side(
            LLM(
                model=str(folder),
                dtype="bfloat16",
                kv_cache_dtype=name,
                kernels=args.kernels,
                max_model_len=longest + args.margin,
                max_num_seqs=num_rows,
                num_blocks=num_blocks,
                block_size=BLOCK_SIZE,
                num_threads=args.threads,
                enable_prefix_caching=False,
                skip_tokenizer_init=True,
            ),
            shape,
        )
        for name in FORMATS
    ]


def report(args: argparse.Namespace, sides: list[Side]) -> None:
    """Print all cases."""
    bandwidth = read_bytes_s()
    plain, quantized = (side.token_bytes for side in sides)
    print(f"bytes a token: auto {plain:,.0f}, int8 {quantized:,.0f}: {quantized / plain:.3f}x")
    print(f"{args.threads} threads, kernels {args.kernels}; {bandwidth / 1e9:.1f} GB/s")
    print(DECODE_HEADER)
    for case in args.cases:
        ours = decode(sides, case, args.rounds, args.steps)
        floors = [side.step_bytes(case) / bandwidth for side in sides]
        shares = [floor / one for floor, one in zip(floors, ours, strict=True)]
        print(
            f"  {case.num_seqs:3d} x {case.context:6,d}  {ours[0] * 1e3:10.2f}"
            f" {ours[1] * 1e3:10.2f}"
            f" {ours[0] / ours[1]:7.3f} {floors[0] * 1e3:12.2f} {floors[1] * 1e3:12.2f}"
            f"      {shares[0]:4.0%}, {shares[1]:4.0%} {floors[0] / floors[1]:17.2f}",
            flush=True,
        )
    print(PREFILL_HEADER)
    for num_tokens in args.prompts:
        ours = prefill(sides, num_tokens, args.rounds)
        print(
            f"  {num_tokens:12,d}  {ours[0] * 1e3:10.2f} {ours[1] * 1e3:10.2f}"
            f" {ours[0] / ours[1]:7.3f}",
            flush=True,
        )


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a folder, in Hugging Face form")
    add("--cases", default="1x32768,16x8192,1x256,16x512", help="sequences x context, decoded")
    add("--prompts", default="512,2048", help="tokens of the prompts that are computed")
    add("--rounds", type=int, default=5)
    add("--steps", type=int, default=8, help="that a side takes at a turn")
    add("--threads", type=int, default=2)
    add("--kernels", default="auto", help="see EngineOptions in docs/python.md")
    args = parser.parse_args(argv)
    args.cases = [Case.parse(text) for text in args.cases.split(",") if text]
    args.prompts = [int(text) for text in args.prompts.split(",") if text]
    args.margin = args.rounds * (args.steps + WARM_UP_STEPS) + 2 * BLOCK_SIZE
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    meter = NoiseMeter()
    longest = max([case.context for case in args.cases] + args.prompts)
    with raised_model(args.model, longest + args.margin) as folder:
        report(args, open_sides(args, folder, longest))
    noise = meter.stop()
    print(f"cores of others: {noise.other_cores}, stolen: {noise.steal_cores}")


if __name__ == "__main__":
    main()
