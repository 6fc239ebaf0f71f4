"""Time of one linear by its number of rows, in each weight format.

    python -m benchmarks.cpu.linear_rows [--formats int4,Q4_K,AWQ] [--shapes 3072x768,8192x2048]
        [--rows 1,8,16] [--kernels avx2] [--repeats 20]

A step that verifies drafts, or that decodes a few sequences, multiplies a few rows by every weight.
One row reads the weights at the memory's rate, so more rows cost nothing until their products take
longer than the reading. Each figure of the table is the time of some number of rows, divided by the
time of one row.

One thread multiplies copies of one linear with random weights, one after the other, so that the
weights come from memory or from a shared cache. Times are of the process, which other processes
disturb less than the clock. Formats and numbers of rows alternate; a cell has the least time, and
the median in brackets, both divided by the least time of one row.

Shapes are outputs x inputs. GGUF types need a multiple of 256 inputs.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from quire.bench.machine import NoiseMeter, processor
from quire.kernels.cpu.abi import WeightLayout
from quire.kernels.cpu.block_quantized.kernel_formats import KernelBlockFormat
from quire.kernels.cpu.block_quantized.quantized_linear import BlockQuantizedLinear, GivenLinear
from quire.kernels.cpu.library import NativeKernels, load_library
from quire.kernels.cpu.linear import PackedLinear, apply
from quire.kernels.quantize import INT8_GROUP

ROUNDED_FORMATS = {
    "bf16": (WeightLayout.DENSE_BF16, 0),
    "int8": (WeightLayout.INT8, INT8_GROUP),
    "int8-128": (WeightLayout.INT8, 128),
    "int8-64": (WeightLayout.INT8, 64),
    "int4": (WeightLayout.INT4, 32),
}
#: Inputs that share a scale; 0: all.
FP8_GROUPS = {"fp8": 0, "fp8-128": 128}
GIVEN_FORMATS = {
    "AWQ": KernelBlockFormat(4, 128, has_zeros=True),
    "Q4_0": KernelBlockFormat(4, 32, zero=8),
    "Q4_K": KernelBlockFormat(4, 32, block=256, has_offsets=True),
    "Q5_K": KernelBlockFormat(5, 32, block=256, has_offsets=True),
    "Q6_K": KernelBlockFormat(6, 16, zero=32, block=256),
    "Q8_0": KernelBlockFormat(8, 32, zero=128),
    "GPTQ-8": KernelBlockFormat(8, 128, zero=128),
}


def make_linear(name: str, num_outputs: int, num_inputs: int) -> PackedLinear:
    """A linear with random weights in the format `name`."""
    if name in ROUNDED_FORMATS:
        layout, group_size = ROUNDED_FORMATS[name]
        linear = PackedLinear(layout, num_outputs, num_inputs, group_size=group_size)
        linear.pack(torch.randn(num_outputs, num_inputs).mul_(0.02).bfloat16(), 0)
        linear.finish()
        return linear
    if name in FP8_GROUPS:
        group = FP8_GROUPS[name]
        of_fp8 = GivenLinear(WeightLayout.FLOAT8, num_outputs, num_inputs, group_size=group)
        rows = torch.randn(num_outputs, num_inputs).mul_(100).to(torch.float8_e4m3fn)
        num_groups = num_inputs // (group or num_inputs)
        of_fp8.pack_float8(rows.view(torch.uint8), torch.full((num_outputs, num_groups), 2e-4), 0)
        return of_fp8
    form = GIVEN_FORMATS[name]
    given = BlockQuantizedLinear(form, num_outputs, num_inputs)
    codes = torch.randint(0, 2**form.width, (num_outputs, num_inputs), dtype=torch.uint8)
    groups = num_outputs, num_inputs // form.group_size
    if form.block:
        scales = torch.randint(1, 64, groups, dtype=torch.int8)
        seconds = torch.randint(0, 64, groups, dtype=torch.uint8) if form.has_offsets else None
        factors = torch.full((num_outputs, num_inputs // form.block, 2), 0.001).half()
        given.pack_codes(codes, scales, seconds, factors, 0)
    else:
        zeros = torch.full(groups, 8, dtype=form.scale_dtype) if form.has_zeros else None
        given.pack_codes(codes, torch.full(groups, 0.01, dtype=form.scale_dtype), zeros, None, 0)
    return given


@dataclass(slots=True)
class Case:
    """A format's linears of one shape, which one call of `run_s` multiplies one after the other."""

    name: str
    linears: list[PackedLinear]
    #: Seconds of a linear, by number of rows.
    times_s: dict[int, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, shape: tuple[int, int], least_bytes: float) -> "Case":
        first = make_linear(name, *shape)
        count = max(2, round(least_bytes / first.num_bytes))
        return cls(name, [first, *(make_linear(name, *shape) for _ in range(count - 1))])

    def run_s(self, kernels: NativeKernels, x: torch.Tensor, out: torch.Tensor) -> float:
        """Seconds of the process for one linear, with the rows x."""
        started_s = time.process_time()
        for linear in self.linears:
            apply(kernels, linear, x, out=out)
        return (time.process_time() - started_s) / len(self.linears)

    def gb_s(self) -> float:
        """GB of weights per second, with one row."""
        return self.linears[0].num_bytes / min(self.times_s[1]) / 1e9

    def cells(self) -> list[str]:
        """The row of the table."""
        one_s = min(self.times_s[1])
        ratios = [
            f"{min(times) / one_s:.2f} ({statistics.median(times) / one_s:.2f})"
            for times in self.times_s.values()
        ]
        return [self.name, f"{one_s * 1e6:.0f}", f"{self.gb_s():.1f}", *ratios]


def measure(
    cases: Sequence[Case],
    kernels: NativeKernels,
    shape: tuple[int, int],
    rows: Sequence[int],
    num_repeats: int,
) -> None:
    """Add `num_repeats` times to every case and number of rows, in turns."""
    xs = {num_rows: torch.randn(num_rows, shape[1]).bfloat16() for num_rows in rows}
    outs = {num_rows: torch.empty(num_rows, shape[0], dtype=torch.bfloat16) for num_rows in rows}
    for repeat in range(-1, num_repeats):
        for num_rows in rows:
            for case in cases:
                took_s = case.run_s(kernels, xs[num_rows], outs[num_rows])
                if repeat >= 0:  # the first one allocates
                    case.times_s.setdefault(num_rows, []).append(took_s)


def lines(cases: Sequence[Case], rows: Sequence[int]) -> list[str]:
    """A table in Markdown."""
    header = ["format", "one row, us", "GB/s", *map(str, rows)]
    table = [header, ["---"] * len(header), *(case.cells() for case in cases)]
    return [f"| {' | '.join(cells)} |" for cells in table]


def read_shape(word: str) -> tuple[int, int]:
    """Outputs and inputs, of a word like 768x3072."""
    outputs, inputs = map(int, word.split("x"))
    return outputs, inputs


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--formats", default="bf16,int8,int4,Q4_K,AWQ")
    parser.add_argument("--shapes", default="768x3072,8192x2048")
    parser.add_argument("--rows", default="1,2,4,6,8,10,12,14,16,24,48")
    parser.add_argument("--kernels", help="an instruction set, by default the best")
    parser.add_argument("--weights-mib", type=float, default=64, help="of all copies of a linear")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args(words)
    rows = [int(word) for word in args.rows.split(",")]
    if rows[0] != 1:
        parser.error(f"--rows is {args.rows}, but must begin with 1")
    kernels = NativeKernels(load_library(), args.kernels, 1)
    print(f"{processor()}, one thread, {kernels.isa}", flush=True)
    for shape in map(read_shape, args.shapes.split(",")):
        cases = [Case.of(name, shape, args.weights_mib * 2**20) for name in args.formats.split(",")]
        meter = NoiseMeter()
        measure(cases, kernels, shape, rows, args.repeats)
        others = meter.stop().other_cores or 0.0
        print(f"\n{shape[0]} outputs, {shape[1]} inputs; others took {others:.2f} cores\n")
        print("\n".join(lines(cases, rows)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
