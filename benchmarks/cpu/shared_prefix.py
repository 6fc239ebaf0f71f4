"""The gain of attention that reads a shared prefix once: branches of one prompt, a decode step.

Two steps with the same queries and the same stored tokens alternate, round by round: in one the
branches' block tables name the same blocks for the prefix, in the other each has a copy of its own.
Their results must be equal up to rounding. Times are medians over rounds of a layer's run; `plan`
is of a step, for all layers. The floor is what must be read of K and V at the memory's measured
speed.

    python -m benchmarks.cpu.shared_prefix --rows 8 16 32 --prefixes 512 2048 8192
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from quire.attention.interface import AttentionBatch, AttentionSpec, GroupBatch, LayerKV
from quire.attention.kv_format import KVFormat
from quire.attention.torch_paged import TorchPagedAttention

Ints = npt.NDArray[np.int32]
Clock = Callable[[], float]

CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
"""Of a machine with other load the processor's time, of one thread, tells more than the wall's."""

HEADS = ("4,2,64", "14,2,64")
"""Of the embedded model, and 7 query heads to a KV head as in Qwen2.5-0.5B."""

HEADER = (
    "  heads       rows  prefix   private     shared  ratio   plan private/shared"
    "     not read      floor private/shared"
)


@dataclass(slots=True)
class Side:
    """A bound backend, its step, and the times of its rounds: us of a layer's run, us of a plan."""

    backend: TorchPagedAttention
    batch: AttentionBatch
    kv_bytes: int
    run_us: list[float] = field(default_factory=list)
    plan_us: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Case:
    """`num_rows` branches of a prompt of `prefix` tokens, each `tail` tokens further."""

    spec: AttentionSpec
    num_rows: int
    prefix: int
    tail: int
    block_size: int
    num_layers: int
    dtype: torch.dtype

    def tables(self) -> tuple[Ints, Ints]:
        """Block tables [rows, blocks] without and with sharing, of blocks that lie anywhere."""
        prefix_blocks = self.prefix // self.block_size
        num_blocks = prefix_blocks - (-self.tail // self.block_size)
        ids = np.random.default_rng(0).permutation(self.num_rows * num_blocks)
        private = ids.astype(np.int32).reshape(self.num_rows, num_blocks)
        shared = private.copy()
        shared[:, :prefix_blocks] = private[0, :prefix_blocks]
        return private, shared

    def batch(self, table: Ints) -> AttentionBatch:
        """A decode step of all branches."""
        context = self.prefix + self.tail
        last = table[:, -1].astype(np.int64) * self.block_size
        slots = torch.from_numpy(last + (context - 1) % self.block_size)
        return AttentionBatch(
            query_start=torch.arange(self.num_rows + 1, dtype=torch.int32),
            context_lens=torch.full((self.num_rows,), context, dtype=torch.int32),
            rows=torch.arange(self.num_rows),
            query_lens_list=[1] * self.num_rows,
            context_lens_list=[context] * self.num_rows,
            rows_list=list(range(self.num_rows)),
            num_decodes=self.num_rows,
            groups=(GroupBatch(torch.from_numpy(table), slots),),
        )

    def sides(self) -> tuple[Side, Side]:
        """Both over one pool, whose prefix blocks hold the same tokens for all branches."""
        private, shared = self.tables()
        page_format = TorchPagedAttention.page_format(
            self.spec, self.block_size, KVFormat.plain(self.dtype)
        )
        width = page_format.bytes_per_layer // self.dtype.itemsize
        storage = torch.randn(private.size, self.num_layers * width).to(self.dtype)
        prefix_blocks = self.prefix // self.block_size
        for row in private[1:]:
            storage[row[:prefix_blocks]] = storage[private[0, :prefix_blocks]]
        pages = storage.view(torch.uint8).unflatten(1, (self.num_layers, -1))  # type: ignore[no-untyped-call]
        layers = tuple(LayerKV(pages[:, i], 0, page_format) for i in range(self.num_layers))
        made = []
        for table in (private, shared):
            backend = TorchPagedAttention()
            backend.bind((self.spec,) * self.num_layers, layers)
            kv_bytes = len(np.unique(table)) * page_format.bytes_per_layer
            made.append(Side(backend, self.batch(table), kv_bytes))
        return made[0], made[1]


def time_us(work: Callable[[], object], clock: Clock) -> float:
    start = clock()
    work()
    return (clock() - start) * 1e6


def compare(case: Case, num_rounds: int, clock: Clock) -> tuple[Side, Side]:
    """Both sides, timed in turn after a warm-up round. Raises if their results differ."""
    sides = case.sides()
    spec, rows = case.spec, case.num_rows
    q = torch.randn(rows, spec.num_heads, spec.head_dim)  # the results' dtype: fp32, to compare
    k, v = torch.randn(2, rows, spec.num_kv_heads, spec.head_dim).to(case.dtype)
    for _ in range(num_rounds + 1):
        results = []
        for side in sides:
            side.plan_us.append(time_us(partial(side.backend.plan, side.batch), clock))
            start = clock()
            results += [side.backend.run(i, q, k, v) for i in range(case.num_layers)]
            side.run_us.append((clock() - start) * 1e6 / case.num_layers)
        private, shared = results[: case.num_layers], results[case.num_layers :]
        if not all(torch.allclose(*pair, atol=5e-6) for pair in zip(private, shared, strict=True)):
            raise RuntimeError(f"{case}: the results differ; a shared prefix must not change them")
    for side in sides:
        del side.run_us[0], side.plan_us[0]
    return sides


def read_bytes_per_us() -> float:
    """The rate of reading memory far beyond the caches: the best of five sums."""
    buffer = torch.ones(64 << 20)
    return buffer.nbytes / min(time_us(buffer.sum, time.perf_counter) for _ in range(5))


def line(case: Case, private: Side, shared: Side, speed: float) -> str:
    """A row under HEADER: times in us, bytes in MB, of one layer and step."""
    runs = [statistics.median(side.run_us) for side in (private, shared)]
    plans = [statistics.median(side.plan_us) for side in (private, shared)]
    floors = [side.kv_bytes / speed for side in (private, shared)]
    unread = (private.kv_bytes - shared.kv_bytes) / 1e6
    spec = case.spec
    heads = f"{spec.num_heads}:{spec.num_kv_heads}x{spec.head_dim}"
    return (
        f"  {heads:10} {case.num_rows:5} {case.prefix:7} {runs[0]:6.0f} us {runs[1]:7.0f} us "
        f"{runs[0] / runs[1]:5.1f}x   {plans[0]:7.0f} / {plans[1]:5.0f} us {unread:9.1f} MB "
        f"  {floors[0]:10.0f} / {floors[1]:5.0f} us"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="attention's gain from reading a prefix once")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--prefixes", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--heads", nargs="+", default=HEADS, help="query heads,KV heads,head size")
    parser.add_argument("--tail", type=int, default=64, help="tokens that a branch has of its own")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: all threads together")
    arguments = parser.parse_args()
    for prefix in arguments.prefixes:
        if prefix % arguments.block_size:
            parser.error(f"--prefixes {prefix} is not a multiple of --block-size")
    if arguments.tail < 1:
        parser.error(f"--tail {arguments.tail} leaves a branch no token of its own; at least 1")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    speed = read_bytes_per_us()
    print(
        f"{arguments.threads} threads, {arguments.clock} time, {arguments.dtype}, "
        f"memory read {speed / 1e3:.1f} GB/s"
    )
    print(HEADER)
    for heads in arguments.heads:
        num_heads, num_kv_heads, head_dim = map(int, heads.split(","))
        spec = AttentionSpec(num_heads, num_kv_heads, head_dim, head_dim**-0.5)
        for prefix in arguments.prefixes:
            for num_rows in arguments.rows:
                case = Case(
                    spec,
                    num_rows,
                    prefix,
                    arguments.tail,
                    arguments.block_size,
                    arguments.layers,
                    getattr(torch, arguments.dtype),
                )
                private, shared = compare(case, arguments.rounds, CLOCKS[arguments.clock])
                print(line(case, private, shared, speed), flush=True)


if __name__ == "__main__":
    main()
