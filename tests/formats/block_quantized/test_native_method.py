"""Native linears of codes against torch's of the same codes, loaded in odd slices, and blocks of
GGUF files against their codes."""

from dataclasses import replace

import pytest
import torch
from tests.formats.block_quantized_samples import BLOCK_FORMATS, FP8, INT8, NVFP4, random_codes
from tests.models.checkpoints.quantized.writers import AWQ_ORDER, words
from torch import nn

from quire.adapters.adapter import LoRAWeights
from quire.adapters.linear_slots import SlotLimits
from quire.adapters.native_slots import NativeAdapterKernels
from quire.formats.block_quantized.linear_methods import (
    BlockQuantizedMethods,
    BlockQuantizedTorchMethod,
    PartsMethod,
)
from quire.formats.block_quantized.weights import (
    BlockFormat,
    CodeWords,
    InputOrder,
    UnpackedRows,
    WordRows,
)
from quire.formats.int8 import GivenInt8TorchMethod
from quire.formats.packed import RecordedMethod, packed
from quire.formats.weight_format import (
    ExpertLinears,
    LinearMethod,
    LinearModule,
    WideInputsMethod,
)
from quire.hub.gguf.storage_types import STORAGE_TYPES
from quire.kernels.activations import Gating
from quire.kernels.cpu.abi import AttentionLayer
from quire.kernels.cpu.block_quantized.kernel_formats import BLOCK_TYPES
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.cpu.recorded_values import UnrecordableError
from quire.kernels.cpu.recorder import Recorder
from quire.kernels.routing import Routing
from quire.layers.linear import Linear, LinearKind
from quire.layers.operator_module import recorded_by
from quire.models.checkpoints.gguf.decoding import BLOCK_QUANTIZED_TYPES, BlockRows

CPU = torch.device("cpu")
STORAGES = {each.name: each for each in STORAGE_TYPES.values() if each.name in BLOCK_TYPES}


def _method(kernels: NativeKernels, block_format: BlockFormat) -> LinearMethod:
    method = BlockQuantizedMethods(kernels).of(block_format)
    assert method is not None and method.takes_quantized(0)
    return method


def _linear(
    method: LinearMethod, codes: UnpackedRows, sizes: tuple[int, ...], **options
) -> LinearModule:
    linear = LinearModule(codes.codes.shape[1], sizes, has_bias=True, **options)
    method.create(linear, True, torch.float32, CPU)
    for index, size in enumerate(sizes):
        start = linear.part_start(index)
        for first in reversed(range(0, size, 7)):
            end = min(first + 7, size)
            part = codes.rows(start + first, start + end)
            method.load_quantized(linear, index, first, part)
        method.load_part(linear, "bias", index, 0, torch.arange(start, start + size) * 0.1)
    method.finish(linear)
    return linear


def _x(rows: int, inputs: int) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1))


def _close(kernels: NativeKernels, result: torch.Tensor, expected: torch.Tensor) -> None:
    """To the bit, but for one more rounding of each term without fused multiply-adds."""
    if kernels.isa != "portable":
        assert torch.equal(result, expected)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5 * expected.abs().max())


@pytest.mark.parametrize("block_format", BLOCK_FORMATS.values(), ids=BLOCK_FORMATS)
def test_multiplies_as_torch_does(kernels: NativeKernels, block_format: BlockFormat) -> None:
    codes, x = random_codes(block_format, 97, 768), _x(6, 768)
    native, reference = _method(kernels, block_format), BlockQuantizedTorchMethod(block_format)
    linear, expected = (_linear(each, codes, (64, 33)) for each in (native, reference))
    _close(kernels, native.apply(linear, x), reference.apply(expected, x))
    wide = native.apply(linear, x.view(2, 3, 768).bfloat16(), torch.float32)
    assert wide.shape == (2, 3, 97) and wide.dtype == torch.float32
    table = native.tie(linear, torch.nn.Parameter(torch.empty(97, 768)))
    assert table is not None
    wanted = torch.tensor([96, 0, 40])
    assert torch.equal(table.unpack(wanted), codes.numbers()[wanted])


def test_nvfp4_becomes_fp8_of_the_same_numbers(kernels: NativeKernels) -> None:
    codes, x = random_codes(NVFP4, 97, 336), _x(6, 336)
    method = _method(kernels, NVFP4)
    linear = _linear(method, codes, (64, 33))
    table = method.tie(linear, torch.nn.Parameter(torch.empty(97, 336)))
    assert table is not None
    wanted = torch.tensor([96, 0, 40])
    assert torch.equal(table.unpack(wanted), codes.numbers()[wanted])
    expected = x.double() @ codes.numbers().double().T + torch.arange(97) * 0.1
    found = method.apply(linear, x)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    alone = torch.cat([method.apply(linear, row[None]) for row in x])
    assert torch.equal(alone, found)
    assert method.num_bytes(96, 336, torch.bfloat16) == 96 * (336 + 4 * 21)


@pytest.mark.parametrize("order", [None, AWQ_ORDER], ids=["GPTQ", "AWQ"])
def test_codes_that_share_words_are_those_that_lie_apart(kernels: NativeKernels, order) -> None:
    codes = random_codes(BLOCK_FORMATS["flat, zeros, 128"], 40, 256)
    stored = words(codes.codes, 4).T if order is None else words(codes.codes.T, 4, order)
    method = _method(kernels, codes.block_format)
    linear = LinearModule(256, (40,), has_bias=False)
    method.create(linear, False, torch.float32, CPU)
    for start, stop in ((0, 13), (13, 40)):
        part, each = codes.rows(start, stop), 1 if order is None else 8
        columns = stored[:, start // each : -(-stop // each)].contiguous()
        of_words = CodeWords(columns, 4, start % each, stop - start, order)
        rows = WordRows(
            of_words, codes.block_format, lambda found, part=part: replace(part, codes=found)
        )
        assert rows.shape == part.shape
        assert all(map(torch.equal, rows.stored, part.stored))
        assert torch.equal(rows.rows(2, 9).numbers(), part.rows(2, 9).numbers())
        wanted = torch.tensor([7, 0])
        assert torch.equal(rows.picked(wanted).numbers(), part.picked(wanted).numbers())
        method.load_quantized(linear, 0, start, rows)
    assert torch.equal(packed(linear).unpack(torch.arange(40)), codes.numbers())


@pytest.mark.parametrize("block_format", BLOCK_FORMATS.values(), ids=BLOCK_FORMATS)
def test_memory_is_what_the_plan_says(kernels: NativeKernels, block_format: BlockFormat) -> None:
    method = _method(kernels, block_format)
    assert isinstance(method, WideInputsMethod)
    linear = LinearModule(768, (96,), has_bias=False)
    method.create(linear, False, torch.bfloat16, CPU)
    method.set_wide_inputs(linear, torch.arange(method.num_wide(linear), dtype=torch.int32))
    num_bytes = packed(linear).num_bytes
    with_wide = method.num_bytes(96, 768, torch.bfloat16) + method.wide_bytes(96, 768)
    assert with_wide == num_bytes
    per_code = num_bytes * 8 / (96 * 768) - block_format.width
    assert 0 < per_code <= 1.26


def test_gate_and_up_are_multiplied(kernels: NativeKernels) -> None:
    block_format = BLOCK_FORMATS["blocks, offsets"]
    codes, x = random_codes(block_format, 46, 512), _x(6, 512)
    native, reference = _method(kernels, block_format), BlockQuantizedTorchMethod(block_format)
    linear = _linear(native, codes, (23, 23), gated=True)
    expected = reference.silu_mul(_linear(reference, codes, (23, 23), gated=True), x)
    torch.testing.assert_close(native.silu_mul(linear, x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [0, 256])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_larger_groups_are_several_of_ours(
    kernels: NativeKernels, size: int, has_zeros: bool
) -> None:
    """x is rounded in groups of 128 inputs, as if each had numbers of its own."""
    inputs = 512
    parts = 1 if size == 0 else 2
    fine = BlockFormat("fine", 4, 128, zero=0 if has_zeros else 8, has_zeros=has_zeros)
    coarse = BlockFormat("coarse", 4, size, zero=fine.zero, has_zeros=has_zeros)
    given = random_codes(BlockFormat("drawn", 4, inputs // parts, has_zeros=has_zeros), 40, inputs)
    repeat = inputs // parts // 128
    zeros = None if given.zeros is None else given.zeros
    numbers = (given.scales, zeros)
    repeated = [None if each is None else each.repeat_interleave(repeat, 1) for each in numbers]
    x, results = _x(5, inputs), []
    for block_format, scales, of_zeros in ((coarse, *numbers), (fine, *repeated)):
        assert scales is not None
        method = _method(kernels, block_format)
        linear = _linear(method, UnpackedRows(block_format, given.codes, scales, of_zeros), (40,))
        results.append(method.apply(linear, x))
    assert torch.equal(*results)


def test_columns_in_another_order_meet_their_inputs(kernels: NativeKernels) -> None:
    order = torch.randperm(512, generator=torch.Generator().manual_seed(2))
    block_format = BlockFormat("GPTQ", 4, 128, has_zeros=True, input_order=InputOrder.of(order))
    codes, x = random_codes(block_format, 40, 512), _x(6, 512)
    native, reference = _method(kernels, block_format), BlockQuantizedTorchMethod(block_format)
    linear, expected = (_linear(each, codes, (24, 16)) for each in (native, reference))
    _close(kernels, native.apply(linear, x), reference.apply(expected, x))
    outputs = torch.arange(40)
    assert torch.equal(packed(linear).unpack(outputs), codes.numbers())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_levels_are_taken_as_they_are(kernels: NativeKernels, dtype: torch.dtype) -> None:
    codes, x = random_codes(INT8, 61, 100), _x(6, 100)
    native, reference = _method(kernels, INT8), GivenInt8TorchMethod()
    linear, expected = (_linear(each, codes, (40, 21)) for each in (native, reference))
    assert torch.equal(native.apply(linear, x), reference.apply(expected, x))
    tables, wanted = [], torch.tensor([60, 0, 40])
    for method in (native, reference):
        linear = LinearModule(100, (61,), has_bias=False)
        method.create(linear, False, dtype, CPU)
        method.load_quantized(linear, 0, 0, codes)
        method.finish(linear)
        table = method.tie(linear, torch.nn.Parameter(torch.empty(61, 100)))
        assert table is not None
        tables.append(table.unpack(wanted))
    assert torch.equal(*tables) and tables[0].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group_size", [0, 128])
def test_fp8_is_taken_as_it_is(kernels: NativeKernels, dtype: torch.dtype, group_size: int) -> None:
    block_format = replace(FP8, group_size=group_size)
    codes, x = random_codes(block_format, 61, 256), _x(6, 256).to(dtype)
    codes.codes[(codes.codes & 0x7F) == 0x7F] = 1  # would be NaN
    method = _method(kernels, block_format)
    result = method.apply(_linear(method, codes, (40, 21)), x, torch.float32)
    expected = (x.double() @ codes.numbers().double().T).float() + torch.arange(61) * 0.1
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-4)
    linear = LinearModule(256, (61,), has_bias=False)
    method.create(linear, False, dtype, CPU)
    method.load_quantized(linear, 0, 0, codes)
    table = method.tie(linear, torch.nn.Parameter(torch.empty(61, 256)))
    wanted = torch.tensor([60, 0, 40])
    assert table is not None
    assert torch.equal(table.unpack(wanted), codes.numbers()[wanted].to(dtype))
    assert method.num_bytes(61, 256, dtype) == packed(linear).num_bytes
    assert BlockQuantizedMethods().of(block_format) is None  # torch has no layout


def test_experts_of_fp8_are_multiplied(kernels: NativeKernels) -> None:
    parts = {True: [], False: []}
    method, outputs = _method(kernels, FP8), []
    for seed in range(4):
        codes = random_codes(FP8, 256, 128, seed)
        codes.codes[(codes.codes & 0x7F) == 0x7F] = 1  # would be NaN
        codes.scales.div_(256)
        parts[True].append(_linear(method, codes, (128, 128), gated=True))
        parts[False].append(_linear(method, codes.rows(0, 128), (128,)))
    layer = ExpertLinears(tuple(parts[True]), tuple(parts[False]), Gating())
    x, ids = _x(40, 128), torch.arange(80).view(40, 2) % 3  # expert 3 gets no token
    routing = Routing(ids, torch.full((40, 2), 0.5))
    found = method.experts(layer, x, routing)
    for row, experts in zip(x, ids, strict=True):
        each = [
            method.apply(layer.down[expert], method.silu_mul(layer.gate_up[expert], row[None]))
            for expert in experts.tolist()
        ]
        outputs.append((each[0] + each[1]) / 2)
    torch.testing.assert_close(found, torch.cat(outputs), rtol=1e-5, atol=1e-5)
    alone = [
        method.experts(layer, x[i : i + 1], Routing(ids[i : i + 1], routing.weights[:1]))
        for i in (0, 21, 39)
    ]
    assert torch.equal(torch.cat(alone), found[[0, 21, 39]])


def test_block_formats_without_a_layout_have_no_method(kernels: NativeKernels) -> None:
    for block_format in (
        BlockFormat("flat", 6, 32),
        BlockFormat("small", 4, 16),
        BlockFormat("odd", 4, 48),
    ):
        assert BlockQuantizedMethods(kernels).of(block_format) is None


# ---- parts of unlike block formats ---------------------------------------------------------------


@pytest.fixture
def fused(kernels: NativeKernels) -> Linear:
    """gate in Q4_K, up in Q6_K: a product each."""
    block_formats = [BLOCK_FORMATS["blocks, offsets"], BLOCK_FORMATS["bytes, blocks"]]
    methods = [_method(kernels, block_format) for block_format in block_formats]
    where = {"bias": False, "dtype": torch.bfloat16, "device": CPU}
    linear = Linear(256, (24, 24), LinearKind.COLUMN, gated=True, **where)
    linear.use(PartsMethod(methods, (24, 24)), torch.bfloat16, CPU)
    for index, block_format in enumerate(block_formats):
        rows = random_codes(block_format, 24, 256, seed=index)
        linear.method.load_quantized(linear, index, 0, rows)
    linear.finish()
    return linear


def _recorder(kernels: NativeKernels) -> Recorder:
    return Recorder(kernels, torch.bfloat16, 8, (AttentionLayer * 0)())


@pytest.mark.parametrize("is_gated", [False, True])
def test_parts_are_recorded_as_products_side_by_side(
    kernels: NativeKernels, fused: Linear, is_gated: bool
) -> None:
    recorder, x = _recorder(kernels), _x(5, 256).bfloat16()
    run = fused.silu_mul if is_gated else fused
    plain, method = run(x), fused.method
    assert isinstance(method, PartsMethod) and method.num_wide(fused) == 2
    method.set_wide_inputs(fused, torch.tensor([3, 200], dtype=torch.int32))
    expected = run(x)
    assert not torch.equal(expected, plain)
    with recorded_by(recorder, nn.ModuleList([fused])):
        rows = recorder.rows(256)
        output = run(rows)
    result = recorder.finish_rows([rows], output).run(x)
    if is_gated:  # torch's silu is not the kernels'
        torch.testing.assert_close(result, expected, rtol=2**-6, atol=1e-6)
    else:
        assert torch.equal(result, expected)
    assert fused.method is method


def test_parts_have_adapters_of_their_own(kernels: NativeKernels, fused: Linear) -> None:
    adapters, x = NativeAdapterKernels(), _x(5, 256).bfloat16()
    plain = fused(x)
    slots = adapters.attach(fused, SlotLimits(max_loras=2, max_rank=8), torch.bfloat16)
    a, b = (torch.randn(*shape).bfloat16() * 0.1 for shape in ((8, 256), (24, 8)))
    slots.load(1, (None, LoRAWeights(a, b, 1.0)))
    adapters.set_rows(torch.tensor([-1, 1, 0, 1, -1], dtype=torch.int32))
    recorder = _recorder(kernels)
    with recorded_by(recorder, nn.ModuleList([fused])):
        rows = recorder.rows(256)
        output = fused(rows)
    for result in (fused(x), recorder.finish_rows([rows], output).run(x)):
        assert torch.equal(result[[0, 2, 4]], plain[[0, 2, 4]])
        assert torch.equal(result[:, :24], plain[:, :24])
        wanted = plain[[1, 3], 24:] + (x[[1, 3]] @ a.T) @ b.T
        torch.testing.assert_close(result[[1, 3], 24:], wanted, rtol=2**-5, atol=0.05)
    slots.clear(1)
    assert torch.equal(fused(x), plain)


def test_unlike_experts_are_not_recorded(kernels: NativeKernels) -> None:
    parts = []
    for name in ("blocks, offsets", "bytes, blocks"):
        codes = random_codes(BLOCK_FORMATS[name], 256, 256)
        parts.append(_linear(_method(kernels, codes.block_format), codes, (128, 128), gated=True))
    layer = ExpertLinears(tuple(parts), tuple(parts), Gating())
    method, routing = RecordedMethod(_recorder(kernels)), Routing(_x(2, 2), _x(2, 2))
    with pytest.raises(UnrecordableError, match="different layouts"):
        method.experts(layer, _x(2, 256), routing)


# ---- blocks of GGUF files ------------------------------------------------------------------------


def test_block_types_are_those_of_gguf() -> None:
    assert BLOCK_TYPES.keys() == STORAGES.keys() <= BLOCK_QUANTIZED_TYPES.keys()
    for name, kind in BLOCK_TYPES.items():
        assert (kind.size, kind.num_bytes) == (
            STORAGES[name].block_size,
            STORAGES[name].block_bytes,
        )
        assert STORAGE_TYPES[kind.number].name == name


@pytest.mark.parametrize("name", BLOCK_TYPES)
@pytest.mark.parametrize("blocks", [1, 3])
def test_blocks_are_packed_as_their_codes_are(
    kernels: NativeKernels, name: str, blocks: int
) -> None:
    storage = STORAGES[name]
    block_format = BLOCK_QUANTIZED_TYPES[name].block_format
    inputs = storage.block_size * blocks
    generator = torch.Generator().manual_seed(blocks)
    shape = (70, storage.block_bytes * blocks)
    raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    rows = BlockRows(storage, raw)
    method = _method(kernels, block_format)
    linears = [LinearModule(inputs, (70,), has_bias=False) for _ in range(2)]
    for linear, given in zip(linears, (rows, rows.unpacked()), strict=True):
        method.create(linear, False, torch.float32, CPU)
        for first in reversed(range(0, 70, 13)):
            method.load_quantized(linear, 0, first, given.rows(first, min(first + 13, 70)))
        method.finish(linear)
    ours, of_codes = (packed(linear).unpack(torch.arange(70)) for linear in linears)
    assert torch.equal(ours.view(torch.int32), of_codes.view(torch.int32))
    wanted = rows.numbers()
    torch.testing.assert_close(ours, wanted, rtol=0, atol=0, equal_nan=True)
