"""Adapters of packed linears: the definition within its bounds, and bitwise against themselves
over batches, neighbours, slots and threads."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from tests.pairwise import pairwise
from torch.nn import functional

from quire.kernels.cpu.abi import Epilogue, WeightLayout
from quire.kernels.cpu.adapters.packed_adapters import (
    PackedAdapters,
    PackedRows,
    PartTensors,
    adapter_bytes,
)
from quire.kernels.cpu.library import NativeKernels, NativeLibrary
from quire.kernels.cpu.linear import PackedLinear, apply
from quire.kernels.options import NATIVE_KERNELS

FORMATS = {torch.float32: WeightLayout.DENSE_F32, torch.bfloat16: WeightLayout.DENSE_BF16}
UNITS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
"""Of rounding."""
DTYPES = pytest.mark.parametrize("dtype", FORMATS, ids=str)
NUM_SLOTS, MAX_RANK = 9, 256
# Inputs, parts. Units have 16 outputs, panels 32; steps have one input or two, sums go in fours.
SHAPES = [(96, (64, 32, 32)), (33, (5, 3, 20)), (130, (77,)), (2050, (1,)), (7, (4, 4, 4, 9, 2))]
RANKS = (16, 1, 256, 8, 17, 64, 3, 32)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        yield


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


class Adapted:
    """A linear with slots for adapters, and what is in them."""

    def __init__(
        self,
        num_inputs: int,
        sizes: tuple[int, ...],
        dtype: torch.dtype,
        *,
        gated: bool = False,
        layout: WeightLayout | None = None,
    ) -> None:
        self.num_inputs, self.sizes, self.dtype = num_inputs, sizes, dtype
        self.weight, self.bias = normal(sum(sizes), num_inputs, dtype=dtype), normal(sum(sizes))
        self.linear = PackedLinear(
            layout or FORMATS[dtype],
            sum(sizes),
            num_inputs,
            group_size=32 if layout is WeightLayout.INT4 else 0,
            interleave=sizes[0] if gated else 0,
            has_bias=True,
            dtype=dtype,
        )
        self.linear.pack(self.weight, 0)
        self.linear.set_bias(self.bias)
        self.linear.finish()
        self.rows = PackedRows()
        self.adapters = PackedAdapters(
            self.rows,
            num_inputs,
            sizes,
            is_interleaved=gated,
            num_slots=NUM_SLOTS,
            max_rank=MAX_RANK,
            dtype=dtype,
        )
        self.loaded: dict[int, Sequence[PartTensors | None]] = {}

    def load(self, slot: int, rank: int, parts: Sequence[int] | None = None) -> None:
        chosen = range(len(self.sizes)) if parts is None else parts
        tensors = [
            (normal(rank, self.num_inputs), normal(size, rank) / 4, 0.5 + part)
            if part in chosen
            else None
            for part, size in enumerate(self.sizes)
        ]
        self.adapters.load(slot, tensors)
        self.loaded[slot] = tensors

    def __call__(
        self, kernels: NativeKernels, x: torch.Tensor, slots: Sequence[int], **options
    ) -> torch.Tensor:
        self.rows.set(torch.tensor(slots, dtype=torch.int32))
        return apply(kernels, self.linear, x, adapter=self.adapters, **options)

    def delta(self, x: torch.Tensor, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of one row in fp64, and how far from it sums in fp32 may be whose inner columns are
        rounded to the dtype."""
        deltas, bounds = [], []
        for size, part in zip(self.sizes, self.loaded.get(slot, [None] * 9), strict=False):
            total = [torch.zeros(size, dtype=torch.float64)] * 2
            if part is not None:
                a, b, scaling = (
                    each.to(self.dtype).double() if isinstance(each, torch.Tensor) else each
                    for each in part
                )
                inner = a @ x.double() * scaling
                size = b.abs() @ (a.abs() @ x.double().abs()) * scaling
                sums = (self.num_inputs + len(a) + 4) * 2.0**-24
                total = [b @ inner, sums * size + b.abs() @ inner.abs() * UNITS[self.dtype]]
            deltas.append(total[0])
            bounds.append(total[1])
        return torch.cat(deltas), torch.cat(bounds)


@DTYPES
@pytest.mark.parametrize(("num_inputs", "sizes"), SHAPES)
def test_deltas_are_within_the_bound_of_fp32_sums(
    kernels: NativeKernels, dtype: torch.dtype, num_inputs: int, sizes: tuple[int, ...]
) -> None:
    adapted = Adapted(num_inputs, sizes, dtype)
    for slot, rank in enumerate(RANKS):
        adapted.load(slot, rank)
    x = normal(19, num_inputs, dtype=dtype)
    slots = [slot % 9 - 1 for slot in range(19)]
    plain = apply(kernels, adapted.linear, x)

    found = adapted(kernels, x, slots)

    for row, slot in enumerate(slots):
        if slot < 0:
            assert torch.equal(found[row], plain[row])
            continue
        delta, bound = adapted.delta(x[row], slot)
        expected = plain[row].double() + delta
        bound = bound + expected.abs() * UNITS[dtype]
        assert ((found[row].double() - expected).abs() <= bound).all()


@pairwise(kernels=NATIVE_KERNELS)
@DTYPES
@pytest.mark.parametrize("layout", [None, WeightLayout.INT8, WeightLayout.INT4], ids=str)
@pytest.mark.parametrize("num_inputs", [96, 770])
def test_a_row_has_the_same_bits_in_every_crowd(
    kernels: NativeKernels, dtype: torch.dtype, num_inputs: int, layout: WeightLayout | None
) -> None:
    """Alone, beside others of its adapter and of eight, and in another slot."""
    adapted = Adapted(num_inputs, (40, 24, 30), dtype, layout=layout)
    for slot, rank in enumerate(RANKS):
        adapted.load(slot, rank, parts=[0, 2] if slot % 2 else None)
    x = normal(70, num_inputs, dtype=dtype)
    plain = apply(kernels, adapted.linear, x)
    slots = [int(slot) for slot in torch.randint(-1, 8, (70,))]
    alone = torch.cat(
        [adapted(kernels, x[row : row + 1], [slot]) for row, slot in enumerate(slots)]
    )

    for count in (2, 7, 16, 33, 70):
        assert torch.equal(adapted(kernels, x[:count], slots[:count]), alone[:count])
    for slot in range(8):
        own = [row for row, each in enumerate(slots) if each == slot]
        assert torch.equal(adapted(kernels, x[own], [slot] * len(own)), alone[own])
        adapted.adapters.load(8, adapted.loaded[slot])
        assert torch.equal(adapted(kernels, x[own], [8] * len(own)), alone[own])
    base = [row for row, each in enumerate(slots) if each < 0]
    assert base and torch.equal(alone[base], plain[base])


@DTYPES
def test_long_prompts_beside_others(kernels: NativeKernels, dtype: torch.dtype) -> None:
    """More rows than are multiplied with one panel after another."""
    adapted = Adapted(1026, (70,), dtype)
    adapted.load(3, 16)
    adapted.load(4, 5)
    x = normal(420, 1026, dtype=dtype)
    slots = [-1] * 3 + [3] * 250 + [4] * 160 + [3] * 7

    found = adapted(kernels, x, slots)

    for row in (0, 2, 3, 4, 191, 192, 252, 253, 300, 412, 413, 419):
        assert torch.equal(found[row], adapted(kernels, x[row : row + 1], [slots[row]])[0])


@DTYPES
def test_number_of_threads_changes_no_bit(library: NativeLibrary, dtype: torch.dtype) -> None:
    adapted = Adapted(300, (333,), dtype)
    for slot, rank in enumerate(RANKS):
        adapted.load(slot, rank)
    x, slots = normal(23, 300, dtype=dtype), [row % 9 - 1 for row in range(23)]
    alone = adapted(NativeKernels(library, num_threads=1), x, slots)

    for num_threads in (2, 3, 5):
        several = NativeKernels(library, num_threads=num_threads)
        assert torch.equal(adapted(several, x, slots), alone)


@DTYPES
@pytest.mark.parametrize("half", [1, 16, 37, 64])
def test_gate_and_up_get_theirs_before_the_activation(
    kernels: NativeKernels, dtype: torch.dtype, half: int
) -> None:
    adapted = Adapted(66, (half, half), dtype, gated=True)
    adapted.load(0, 8)
    adapted.load(1, 8, parts=[1])
    adapted.load(2, 8, parts=[0])
    x, slots = normal(9, 66, dtype=dtype), [0, 1, 2, -1, 0, 0, -1, 2, 1]

    together = adapted(kernels, x, slots)
    gated = adapted(kernels, x, slots, epilogue=Epilogue.SILU_MUL)

    gate, up = together.split(half, dim=1)
    bits = 23 if dtype is torch.float32 else 8
    torch.testing.assert_close(gated, functional.silu(gate) * up, rtol=8 * 2.0**-bits, atol=1e-7)
    base = apply(kernels, adapted.linear, x, epilogue=Epilogue.SILU_MUL)
    assert torch.equal(gated[[3, 6]], base[[3, 6]])
    unadapted = apply(kernels, adapted.linear, x)
    assert torch.equal(together[[1, 8], :half], unadapted[[1, 8], :half])
    assert torch.equal(together[[2, 7], half:], unadapted[[2, 7], half:])


@DTYPES
def test_a_residual_is_added_last(kernels: NativeKernels, dtype: torch.dtype) -> None:
    adapted = Adapted(64, (50,), dtype)
    adapted.load(2, 16)
    x, slots, residual = normal(4, 64, dtype=dtype), [2, -1, 2, 2], normal(4, 50, dtype=dtype)
    expected = residual + adapted(kernels, x, slots)

    adapted(kernels, x, slots, out=residual, epilogue=Epilogue.ADD_RESIDUAL)

    assert torch.equal(residual, expected)


def test_logits_of_a_router_are_not_rounded(kernels: NativeKernels) -> None:
    adapted = Adapted(64, (10,), torch.bfloat16)
    adapted.load(0, 4)
    x = normal(3, 64, dtype=torch.bfloat16)
    plain = apply(kernels, adapted.linear, x, out_dtype=torch.float32)

    found = adapted(kernels, x, [0, -1, 0], out_dtype=torch.float32)

    delta, bound = adapted.delta(x[0], 0)
    distance = (found[0].double() - plain[0].double() - delta).abs()
    assert (distance <= bound + found[0].abs() * UNITS[torch.float32]).all()
    assert torch.equal(found[1], plain[1])


def test_a_slot_is_filled_anew_and_emptied(kernels: NativeKernels) -> None:
    adapted = Adapted(48, (20, 30), torch.bfloat16)
    x, slots = normal(5, 48, dtype=torch.bfloat16), [0, 0, 1, 0, -1]
    address = adapted.adapters.struct.slots
    adapted.load(0, 5)
    adapted.load(1, 7)
    first = adapted(kernels, x, slots)
    kept = adapted.loaded[0]
    adapted.load(0, 256)
    assert not torch.equal(adapted(kernels, x, slots)[0], first[0])
    adapted.adapters.load(0, kept)
    assert torch.equal(adapted(kernels, x, slots), first)
    adapted.adapters.clear(0)
    plain = apply(kernels, adapted.linear, x)
    found = adapted(kernels, x, slots)
    assert torch.equal(found[[0, 1, 3, 4]], plain[[0, 1, 3, 4]])
    assert torch.equal(found[2], first[2])
    adapted.adapters.load(1, [None, None])
    assert torch.equal(adapted(kernels, x, slots), plain)
    assert adapted.adapters.struct.slots == address


def test_a_row_of_nans_stays_alone(kernels: NativeKernels) -> None:
    adapted = Adapted(65, (40,), torch.bfloat16)
    adapted.load(0, 16)
    x = normal(20, 65, dtype=torch.bfloat16)
    clean = adapted(kernels, x, [0] * 20)
    x[7] = torch.nan

    found = adapted(kernels, x, [0] * 20)

    assert found[7].isnan().all()
    others = [row for row in range(20) if row != 7]
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("is_interleaved", [False, True])
@DTYPES
def test_adapter_bytes_predicts_the_allocated_size(
    dtype: torch.dtype, is_interleaved: bool
) -> None:
    shape = {"is_interleaved": is_interleaved, "num_slots": 3, "max_rank": 20, "dtype": dtype}
    adapters = PackedAdapters(PackedRows(), 33, (21, 21), **shape)
    assert adapters.num_bytes == adapter_bytes(33, (21, 21), **shape)
    for slot in range(3):
        adapters.load(slot, [(torch.ones(20, 33), torch.ones(21, 20), 1.0)] * 2)


@pytest.mark.parametrize("half", ["a", "b"])
@DTYPES
def test_halves_shared_by_two_linears_are_kept_once(
    kernels: NativeKernels, dtype: torch.dtype, half: str
) -> None:
    sizes, x, rows = (5, 3, 20), normal(4, 33, dtype=dtype), [1, 0, -1, 1]
    shape = {"is_interleaved": False, "num_slots": NUM_SLOTS, "max_rank": MAX_RANK, "dtype": dtype}
    one, two = Adapted(33, sizes, dtype), Adapted(33, sizes, dtype)
    alone = PackedAdapters(two.rows, 33, sizes, **shape)
    getattr(two.adapters, f"share_{half}")(one.adapters)
    others = {f"has_{half}": False}
    assert two.adapters.num_bytes == adapter_bytes(33, sizes, **shape, **others) < alone.num_bytes
    for slot, rank in ((1, 256), (0, 17), (1, 6)):
        one.load(slot, rank)
        parts = [
            (a, normal(*b.shape), 0.25) if half == "a" else (normal(*a.shape), b, 0.25)
            for a, b, _ in filter(None, one.loaded[slot])
        ]
        for each in (alone, two.adapters):
            each.load(slot, parts)
    found = two(kernels, x, rows)
    assert torch.equal(found, apply(kernels, two.linear, x, adapter=alone))
    assert not torch.equal(found, apply(kernels, two.linear, x))


def test_other_rows_and_other_linears_are_named(kernels: NativeKernels) -> None:
    adapted = Adapted(32, (20,), torch.float32)
    other = Adapted(32, (21,), torch.float32)
    x = normal(3, 32)
    with pytest.raises(ValueError, match="x has 3 rows, but adapters were set for 2"):
        adapted(kernels, x, [0, 1])
    with pytest.raises(ValueError, match="a linear with 32 inputs and 20 outputs"):
        apply(kernels, other.linear, x, adapter=adapted.adapters)
