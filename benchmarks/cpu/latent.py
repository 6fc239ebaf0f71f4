"""Latent attention (multi-head latent attention): the native kernels against torch and the floor.

A layer's run at a time, of quire over paged memory, its blocks anywhere, and of torch's absorbed
products over one contiguous tensor, which alternate in one process, over as many layers as no
cache holds. Times are medians. The floor is the greater of two: the bytes that must be read at the
memory's measured speed, and the operations that must be done at the rate of large bf16 products
(`roofline.py`); a multiplication and an addition are two. Defaults: a layer of DeepSeek-V2-Lite.

    python -m benchmarks.cpu.latent --threads 2 --contexts 1024 8192 32768
    python -m benchmarks.cpu.latent --threads 2 --contexts 1024 8192 --chunk 512
"""

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.cpu.roofline import matrix_ops_s, read_bytes_s
from quire.attention.cpu_paged import CpuPagedAttention
from quire.attention.interface import AttentionBatch, AttentionSpec, GroupBatch, LayerKV
from quire.attention.kv_format import KVFormat
from quire.bench.machine import NoiseMeter
from quire.kernels.cpu.library import NativeKernels, load_library
from quire.kernels.cpu.memory import allocate

UNCACHED_BYTES = 160 << 20
"""Of all layers together: several times the last cache of this class of machine."""

SETTLE_S = 0.1

HEADER = (
    "  context  chunk  rows    quire ms    torch ms  ratio     GB/s  GFLOP/s   floor ms"
    "  of the floor"
)


def drawn(*shape: int) -> torch.Tensor:
    """Numbers in bf16, in huge pages where the system has them."""
    memory = allocate(2 * math.prod(shape)).view(torch.bfloat16)
    return memory.normal_().view(shape)


@dataclass(frozen=True, slots=True)
class Case:
    """`rows` sequences of `context` tokens. The last `chunk` tokens of each are computed."""

    spec: AttentionSpec
    context: int
    chunk: int
    rows: int
    block_size: int

    @property
    def value_dim(self) -> int:
        assert self.spec.value_dim is not None
        return self.spec.value_dim

    @property
    def layer_bytes(self) -> int:
        """The bytes of the stored vectors that a layer reads, in bf16."""
        return 2 * self.rows * self.context * self.spec.head_dim

    @property
    def num_ops(self) -> int:
        """The operations of a layer for the keys that causal queries see."""
        pairs = self.chunk * self.context - self.chunk * (self.chunk - 1) // 2
        sizes = self.spec.head_dim + self.value_dim
        return 2 * self.rows * self.spec.num_heads * pairs * sizes

    @property
    def num_layers(self) -> int:
        return max(2, -(-UNCACHED_BYTES // self.layer_bytes))

    def batch(self) -> AttentionBatch:
        """The batch, with its blocks at random places."""
        per_row = -(-self.context // self.block_size)
        table = torch.randperm(self.rows * per_row).to(torch.int32).view(self.rows, per_row)
        positions = torch.arange(self.context - self.chunk, self.context)
        blocks = table[:, positions // self.block_size].long()
        slots = blocks * self.block_size + positions % self.block_size
        return AttentionBatch(
            query_start=torch.arange(self.rows + 1, dtype=torch.int32) * self.chunk,
            context_lens=torch.full((self.rows,), self.context, dtype=torch.int32),
            rows=torch.arange(self.rows),
            query_lens_list=[self.chunk] * self.rows,
            context_lens_list=[self.context] * self.rows,
            rows_list=list(range(self.rows)),
            num_decodes=self.rows if self.chunk == 1 else 0,
            groups=(GroupBatch(table, slots.flatten()),),
        )

    def runs(self, kernels: NativeKernels) -> list[Callable[[], torch.Tensor]]:
        """quire's run of each layer."""
        backend = CpuPagedAttention(kernels)
        page = backend.page_format(self.spec, self.block_size, KVFormat.plain(torch.bfloat16))
        batch = self.batch()
        num_blocks = batch.groups[0].block_tables.numel()
        stored = drawn(num_blocks, self.num_layers, page.bytes_per_layer // 2)
        pages = stored.view(torch.uint8)
        layers = tuple(LayerKV(pages[:, i], 0, page) for i in range(self.num_layers))
        backend.bind((self.spec,) * self.num_layers, layers)
        backend.plan(batch)
        num_tokens = self.rows * self.chunk
        q = torch.randn(num_tokens, self.spec.num_heads, self.spec.head_dim).bfloat16()
        k = torch.randn(num_tokens, 1, self.spec.head_dim).bfloat16()
        return [lambda i=i: backend.run(i, q, k, None) for i in range(self.num_layers)]

    def peers(self) -> list[Callable[[], torch.Tensor]]:
        """torch's products of each layer: scores, softmax in fp32, values."""
        size = (self.rows, self.context, self.spec.head_dim)
        stored = [drawn(*size) for _ in range(self.num_layers)]
        q = torch.randn(self.rows, self.chunk * self.spec.num_heads, self.spec.head_dim).bfloat16()
        hidden = torch.full((self.chunk, self.context), float("-inf"))
        hidden.triu_(self.context - self.chunk + 1)

        def run(latents: torch.Tensor) -> torch.Tensor:
            scores = torch.matmul(q, latents.transpose(1, 2)).float().mul_(self.spec.scale)
            if self.chunk > 1:
                scores.unflatten(1, (self.chunk, -1)).add_(hidden[:, None])
            probs = torch.softmax(scores, -1).bfloat16()
            return torch.matmul(probs, latents[..., : self.value_dim])

        return [lambda x=x: run(x) for x in stored]


def median_s(rounds: int, sides: list[list[Callable[[], torch.Tensor]]]) -> list[float]:
    """The median seconds of a layer, for each side. A round runs all layers of one side, then all
    of the other, each time after the threads of the other have stopped spinning."""
    found: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds + 1):
        for times, layers in zip(found, sides, strict=True):
            time.sleep(SETTLE_S)
            layers[-1]()
            started_s = time.perf_counter()
            for run in layers:
                run()
            times.append((time.perf_counter() - started_s) / len(layers))
    return [statistics.median(times[1:]) for times in found]


Roofs = tuple[float, float]
"""Bytes and operations per second."""


def better(roofs: Roofs) -> Roofs:
    """The best that was measured, now included: a floor must not be beaten."""
    return max(roofs[0], read_bytes_s()), max(roofs[1], matrix_ops_s()["bf16"])


def line(case: Case, ours_s: float, theirs_s: float, roofs: Roofs) -> str:
    """A line of the table."""
    floor_s = max(case.layer_bytes / roofs[0], case.num_ops / roofs[1])
    return (
        f"{case.context:9d}{case.chunk:7d}{case.rows:6d}{ours_s * 1e3:12.3f}{theirs_s * 1e3:12.3f}"
        f"{theirs_s / ours_s:7.2f}{case.layer_bytes / ours_s / 1e9:9.1f}"
        f"{case.num_ops / ours_s / 1e9:9.0f}{floor_s * 1e3:11.3f}{floor_s / ours_s:14.0%}"
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=576)
    parser.add_argument("--value-dim", type=int, default=512)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--chunk", type=int, default=1, help="tokens that are computed; 1: decode")
    parser.add_argument("--rows", type=int, default=1, help="sequences of the step")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    torch.set_num_threads(args.threads)
    kernels = NativeKernels(load_library(), num_threads=args.threads)
    spec = AttentionSpec(args.heads, 1, args.head_dim, 192**-0.5, value_dim=args.value_dim)
    meter = NoiseMeter()
    roofs = better((0.0, 0.0))
    found: list[tuple[Case, list[float]]] = []
    for context in args.contexts:
        case = Case(spec, context, args.chunk, args.rows, args.block_size)
        found.append((case, median_s(args.rounds, [case.runs(kernels), case.peers()])))
        roofs = better(roofs)
    print(f"{kernels.isa}, {args.threads} threads, heads {args.heads} of {args.head_dim}, ", end="")
    print(f"values {args.value_dim}: {roofs[0] / 1e9:.1f} GB/s, {roofs[1] / 1e9:.0f} GFLOP/s")
    print(HEADER)
    for case, (ours_s, theirs_s) in found:
        print(line(case, ours_s, theirs_s, roofs))
    noise = meter.stop()
    print(f"cores of others: {noise.other_cores}, stolen: {noise.steal_cores}")


if __name__ == "__main__":
    main()
