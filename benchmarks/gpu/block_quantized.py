"""Weights that are a checkpoint's codes, on the device: right in every block format, and how fast.

One row reads the weight: its floor is the weight's bytes at the copy's bandwidth. 4,096 rows have
the matrix rate of bf16 for a goal.
"""

import torch

from benchmarks.gpu.attention import BOUNDS, relative_error
from benchmarks.gpu.harness import Bench
from quire.formats.block_quantized.linear_methods import (
    BlockQuantizedMethods,
    BlockQuantizedTorchMethod,
)
from quire.formats.block_quantized.triton_method import TritonBlockQuantizedMethod
from quire.formats.block_quantized.weights import BlockFormat, UnpackedRows
from quire.formats.weight_format import ExpertLinears, LinearMethod, LinearModule, TritonLinears
from quire.kernels.activations import Gating
from quire.kernels.routing import RouterSpec, Routing, route
from quire.kernels.triton.operators import TritonOperators

E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
BLOCK_FORMATS = (
    BlockFormat("Q4_0", 4, 32, zero=8),
    BlockFormat("Q4_1", 4, 32, has_offsets=True),
    BlockFormat("AWQ", 4, 128, has_zeros=True),
    BlockFormat("W4A16", 4, 64, has_zeros=True, scale_dtype=torch.bfloat16),
    BlockFormat("MXFP4", 4, 32, table=E2M1_TWICE, scale_dtype=torch.bfloat16),
    BlockFormat("NVFP4", 4, 16, table=E2M1_TWICE, scale_dtype=torch.float8_e4m3fn),
    BlockFormat("Q4_K", 4, 32, has_offsets=True, block_size=256),
    BlockFormat("IQ4_XS", 4, 32, table=E2M1_TWICE, block_size=256),
    BlockFormat("Q8_0", 8, 32, zero=128),
    BlockFormat("Q6_K", 6, 16, zero=32, block_size=256),
    BlockFormat("Q5_K", 5, 32, has_offsets=True, block_size=256),
)
MEASURED = ("Q4_0", "AWQ", "MXFP4", "NVFP4", "Q4_K", "Q8_0", "Q6_K")
ROWS = (1, 7, 16, 17, 70)

# Both sides round activations to the same integers and sum groups in the same order.
EXACT_BOUND = 1e-6

ROW_GOAL, PROMPT_GOAL = 0.60, 0.70


def random_codes(
    block_format: BlockFormat, rows: int, inputs: int, device: torch.device
) -> UnpackedRows:
    """Numbers about as large as a model's."""

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, device=device)

    def floats(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device=device) * 0.01 + 0.001

    groups = inputs // block_format.group_size
    codes = integers(0, 2**block_format.width, rows, inputs).byte()
    zeros = integers(0, 16, rows, groups).byte() if block_format.has_zeros else None
    if block_format.has_output_factors:
        scales = (floats(rows, groups) * 1000).to(block_format.scale_dtype)
        return UnpackedRows(block_format, codes, scales, factors=floats(rows, 1, 1))
    if not block_format.block_size:
        scales = floats(rows, groups).to(block_format.scale_dtype)
        offsets = (
            (floats(rows, groups) * 8).to(block_format.scale_dtype)
            if block_format.has_offsets
            else None
        )
        return UnpackedRows(block_format, codes, scales, zeros, offsets)
    scales = integers(0 if block_format.has_offsets else -32, 32, rows, groups).to(torch.int8)
    offsets = integers(0, 64, rows, groups).byte() if block_format.has_offsets else None
    factors = (floats(rows, inputs // block_format.block_size, 2) * 0.05).half()
    return UnpackedRows(block_format, codes, scales, zeros, offsets, factors)


def _linear(
    method: LinearMethod, codes: UnpackedRows, device: torch.device, bench: Bench
) -> LinearModule:
    num_outputs, num_inputs = codes.codes.shape
    half = num_outputs // 2
    linear = LinearModule(num_inputs, (half, half), has_bias=False, gated=True)
    method.create(linear, False, bench.dtype, device)
    for index in range(2):
        part = codes.rows(index * half, (index + 1) * half)
        method.load_quantized(linear, index, 0, part)
    method.finish(linear)
    return linear


def _method(block_format: BlockFormat, *, is_invariant: bool) -> TritonBlockQuantizedMethod:
    linears = TritonLinears(TritonOperators(), batch_invariant=is_invariant)
    method = BlockQuantizedMethods(None, linears).of(block_format)
    assert isinstance(method, TritonBlockQuantizedMethod)
    return method


def check_block_format(bench: Bench, block_format: BlockFormat) -> None:
    """Beside the reference on the CPU, over rows that choose different tiles."""
    sizes = (16, 64) if bench.small else (768, 1280)
    cpu = torch.device("cpu")
    codes = random_codes(block_format, *sizes, cpu)
    method, reference = (
        _method(block_format, is_invariant=True),
        BlockQuantizedTorchMethod(block_format),
    )
    linear = _linear(method, codes, bench.device, bench)
    wanted = _linear(reference, codes, cpu, bench)
    num_rows = 3 if bench.small else max(ROWS)
    x = torch.randn(num_rows, sizes[1], device=bench.device).to(bench.dtype)
    found = method.apply(linear, x, torch.float32)
    error = relative_error(found.cpu(), reference.apply(wanted, x.cpu(), torch.float32))
    bench.at_most(f"{block_format.name} products", error, EXACT_BOUND, is_time=False)
    same = all(
        torch.equal(method.apply(linear, x[:count], torch.float32), found[:count])
        for count in ROWS
        if count <= num_rows
    )
    bench.check(f"{block_format.name}: a row has the same bits in any batch", same)
    rows = torch.tensor([sizes[0] - 1, 0, 5])
    source = method.tie(linear, torch.nn.Parameter(torch.empty(0, device=bench.device)))
    assert source is not None
    numbers = codes.numbers()[rows].to(bench.dtype)
    exact = torch.equal(source.unpack(rows.to(bench.device)).cpu(), numbers)
    bench.check(f"{block_format.name}: rows are the block format's numbers", exact)
    if not bench.small:
        for count in (70, 300):
            _check_numbers(bench, _method(block_format, is_invariant=False), linear, codes, count)
    _check_experts(bench, block_format)


def check_float8(bench: Bench) -> None:
    """fp8 weights, with a scale for each 128 inputs and for each output, beside their numbers."""
    sizes = (16, 128) if bench.small else (768, 1280)
    for group in (128, 0):
        block_format = BlockFormat(
            f"fp8, groups of {group}", 8, group, is_float8=True, scale_dtype=torch.float32
        )
        # 0x7f and 0xff are NaN.
        codes = torch.randint(0, 0x7F, sizes).byte() | torch.randint(0, 2, sizes).byte() << 7
        scales = torch.rand(sizes[0], sizes[1] // (group or sizes[1])) * 0.001
        rows = UnpackedRows(block_format, codes, scales)
        linears = TritonLinears(TritonOperators(), batch_invariant=False)
        method = BlockQuantizedMethods(None, linears).of(block_format)
        assert method is not None
        linear = _linear(method, rows, bench.device, bench)
        for count in (3, 17) if bench.small else (1, 70, 300):
            _check_numbers(bench, method, linear, rows, count)
        wanted = torch.tensor([sizes[0] - 1, 0, 5])
        source = method.tie(linear, torch.nn.Parameter(torch.empty(0, device=bench.device)))
        assert source is not None
        found = source.unpack(wanted.to(bench.device)).cpu()
        exact = torch.equal(found, rows.numbers()[wanted].to(bench.dtype))
        bench.check(f"{block_format.name}: rows are the weight's numbers", exact)


def _check_numbers(
    bench: Bench, method: LinearMethod, linear: LinearModule, codes: UnpackedRows, count: int
) -> None:
    """The products of `count` rows, beside those with the numbers that the codes stand for."""
    x = torch.randn(count, codes.codes.shape[1], device=bench.device).to(bench.dtype)
    error = relative_error(
        method.apply(linear, x).cpu(), x.double().cpu() @ codes.numbers().double().T
    )
    name = f"{codes.block_format.name}, {count} rows"
    bench.at_most(name, error, BOUNDS[bench.dtype], is_time=False)


def _check_experts(bench: Bench, block_format: BlockFormat) -> None:
    """All of a layer's at once are those one after the other."""
    hidden, inner, num_experts = (32, 32, 2) if bench.small else (512, 256, 16)
    method = _method(block_format, is_invariant=True)
    shapes = ((2 * inner, hidden), (hidden, inner))
    gate_up, down = (
        [
            _linear(method, random_codes(block_format, *shape, bench.device), bench.device, bench)
            for _ in range(num_experts)
        ]
        for shape in shapes
    )
    layer = ExpertLinears(tuple(gate_up), tuple(down), Gating())
    x = torch.randn(2 if bench.small else 33, hidden, device=bench.device).to(bench.dtype)
    spec = RouterSpec(num_experts=num_experts, top_k=1 if bench.small else 2)
    routing = route(torch.randn(len(x), num_experts), None, spec, bench.dtype)
    moved = Routing(routing.ids.to(bench.device), routing.weights.to(bench.device))
    wanted = LinearMethod.experts(method, layer, x, moved)
    error = relative_error(method.experts(layer, x, moved), wanted)
    bench.at_most(f"{block_format.name}, experts", error, BOUNDS[bench.dtype], is_time=False)


def measure_block_quantized(bench: Bench) -> None:
    """A linear of an 8B's MLP: of one row, of some, and of a prompt."""
    num_outputs, num_inputs = (32, 64) if bench.small else (28_672, 4096)
    block_formats = [
        block_format for block_format in BLOCK_FORMATS if block_format.name in MEASURED
    ]
    for block_format in block_formats[:1] if bench.small else block_formats:
        codes = random_codes(block_format, num_outputs, num_inputs, bench.device)
        invariant, fast = (_method(block_format, is_invariant=each) for each in (True, False))
        num_bytes = fast.num_bytes(num_outputs, num_inputs, bench.dtype)
        # Several, so that none is found in the L2 cache.
        count = 1 if bench.small else max(1, 2**28 // num_bytes)
        linears = [_linear(fast, codes, bench.device, bench) for _ in range(count)]
        del codes
        x = torch.randn(1, num_inputs, device=bench.device).to(bench.dtype)

        def multiply(
            linears: list[LinearModule] = linears,
            x: torch.Tensor = x,
            method: TritonBlockQuantizedMethod = fast,
        ) -> None:
            for linear in linears:
                method.apply(linear, x)

        seconds = bench.time_graph_s(multiply) / count
        share = num_bytes / seconds / bench.roofline().read_bytes_s
        note = f"{seconds * 1e6:.1f} us, {num_bytes / seconds / 1e9:.0f} GB/s"
        name = f"{block_format.name}, one row by {num_outputs} x {num_inputs}"
        bench.at_least(name, share, ROW_GOAL, "of copy bandwidth", note)
        if not bench.small:
            _measure_rows(bench, block_format.name, linears[0], (invariant, fast))


def _measure_rows(
    bench: Bench,
    name: str,
    linear: LinearModule,
    methods: tuple[TritonBlockQuantizedMethod, TritonBlockQuantizedMethod],
) -> None:
    """methods: by the kernel for all rows, and by numbers for many."""
    invariant, fast = methods
    times = []
    for num_rows in (16, 64, 128, 256, 512):
        x = torch.randn(num_rows, linear.input_size, device=bench.device).to(bench.dtype)
        by_kernel = bench.time_s(lambda x=x: invariant.apply(linear, x), reps=5)
        by_numbers = bench.time_s(lambda x=x: fast.multiply_numbers(linear, x, x.dtype), reps=5)
        times.append(f"{num_rows} rows {by_kernel * 1e6:.0f} and {by_numbers * 1e6:.0f}")
    bench.add(f"{name}, by the kernel and by numbers", None, note="us: " + "; ".join(times))
    x = torch.randn(4096, linear.input_size, device=bench.device).to(bench.dtype)
    operations = 2 * len(x) * linear.input_size * linear.output_size
    for label, method in (("", fast), (", invariant", invariant)):
        seconds = bench.time_s(lambda method=method: method.apply(linear, x), reps=5, warmups=2)
        share = operations / seconds / bench.roofline().ops_s["bf16"]
        note = f"{seconds * 1e3:.2f} ms"
        row = f"{name}, 4096 rows{label}"
        if label:
            bench.add(row, share, "of the matrix rate", note=note)
        else:
            bench.at_least(row, share, PROMPT_GOAL, "of the matrix rate", note)
