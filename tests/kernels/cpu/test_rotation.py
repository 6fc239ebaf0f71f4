"""Rotation and the write of K and V, against torch and bitwise against itself.

Products and sums are rounded one by one, as torch does, so both are equal to the bit; heads that
are normed first as `test_elementwise` says of norms.
"""

import ctypes
from dataclasses import dataclass, field

import pytest
import torch
from tests.kernels.cpu import elementwise
from tests.pairwise import pairwise

from quire.kernels.cpu import abi
from quire.kernels.cpu.library import NativeKernels, NativeLibrary
from quire.kernels.options import NATIVE_KERNELS
from quire.kernels.rotary import Angles, Rotation, rotate

DTYPES = [torch.float32, torch.bfloat16]
PARTS = [(64, 16), (64, 32), (64, 48), (128, 32), (128, 64), (128, 96), (80, 20), (12, 2)]
"""D, and how many elements of a head rotate."""
ULP = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7}
EPS = 1e-6


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass
class Heads:
    """What a test rotates: T tokens at scattered positions, stored at scattered slots. rotation:
    None: nothing is done to q and k."""

    qkv: torch.Tensor
    pages: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    layer: abi.AttentionLayer
    rotation: Rotation | None
    rotated: torch.Tensor = field(init=False)

    def run(self, kernels: NativeKernels, *, stores: bool = True) -> None:
        """Rotates q and fills pages."""
        group = abi.KVGroupStep(slot_mapping=self.slots.data_ptr())
        step = abi.Step(num_tokens=len(self.positions), positions=self.positions.data_ptr())
        step.groups = ctypes.addressof(group)
        q, k, v = self.split()
        heads = (q, k, v) if stores else (q, None, None)
        self.rotated = elementwise.rotate_and_write_kv(
            kernels, self.layer, self.native_rotation(), step, heads
        )

    def native_rotation(self) -> abi.Rotary | None:
        if self.rotation is None:
            return None
        offset = self.rotation.norm_offset
        native = abi.Rotary(norm_eps=EPS, offsets_norm=offset is not None, norm_offset=offset or 0)
        if self.rotation.angles is not None:
            table = self.rotation.angles.table
            native.table, native.rotary_dim = table.data_ptr(), table.shape[1]
        for name in ("q_norm", "k_norm"):
            weight = getattr(self.rotation, name)
            setattr(native, name, None if weight is None else weight.data_ptr())
        return native

    def split(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v [T, heads, D] as they lie in the product."""
        heads = self.qkv.unflatten(1, (-1, self.layer.head_dim))
        counts = [self.layer.num_heads, self.layer.num_kv_heads, self.layer.num_kv_heads]
        q, k, v = heads.split(counts, dim=1)
        return q, k, v

    def expected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k [T, heads, D] as torch rotates them, and v."""
        q, k, v = (part.clone() for part in self.split())
        if self.rotation is not None:
            q, rotated_k = rotate(q, k, self.rotation)
            assert rotated_k is not None
            k = rotated_k
        return q, k, v

    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v [T, Hkv, D] read back from the pages; see csrc/attention/kv_page.h."""
        layer = self.layer
        size, unit = layer.block_size, min(layer.block_size, 16)
        halves = self.pages.view(-1, layer.num_kv_heads, 2, size // unit, unit * layer.head_dim)
        keys, values = halves[:, :, 0], halves[:, :, 1]
        if self.qkv.dtype is torch.bfloat16:
            keys = keys.unflatten(-1, (layer.head_dim // 2, unit, 2)).transpose(-3, -2)
            values = values.unflatten(-1, (unit // 2, layer.head_dim, 2)).transpose(-2, -1)
        else:
            keys = keys.unflatten(-1, (layer.head_dim, unit)).transpose(-2, -1)
        # [blocks, Hkv, B, D] -> [slots, Hkv, D]
        shape = (-1, layer.num_kv_heads, size, layer.head_dim)
        keys, values = (
            half.reshape(shape).transpose(1, 2).flatten(0, 1) for half in (keys, values)
        )
        return keys[self.slots], values[self.slots]


def make_heads(
    num_tokens: int,
    dtype: torch.dtype,
    *,
    head_dim: int = 64,
    rotary_dim: int | None = None,
    block_size: int = 16,
    normalises: bool = False,
    norm_offset: float | None = None,
) -> Heads:
    """rotary_dim: how many elements of a head rotate; None: all; 0: none."""
    num_heads, num_kv_heads, num_blocks = 3, 2, 64 + 2 * num_tokens // block_size
    generator = torch.Generator().manual_seed(num_tokens)
    pages = torch.full((num_blocks, 2 * num_kv_heads * block_size * head_dim), torch.nan)
    pages = pages.to(dtype)
    norms = [random(head_dim, dtype=dtype, seed=seed) if normalises else None for seed in (5, 6)]
    num_pairs = (head_dim if rotary_dim is None else rotary_dim) // 2
    turns = torch.outer(torch.arange(400.0), torch.rand(num_pairs, generator=generator))
    positions = torch.randint(400, (num_tokens,), generator=generator)
    angles = Angles(torch.cat((turns.cos(), turns.sin()), dim=-1), positions, dtype)
    return Heads(
        qkv=random(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype),
        pages=pages,
        positions=positions,
        slots=torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens],
        rotation=Rotation(angles if num_pairs else None, *norms, EPS, norm_offset),
        layer=abi.AttentionLayer(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            dtype=abi.DTYPES[dtype],
            pages=pages.data_ptr(),
            page_stride=pages.stride(0) * dtype.itemsize,
        ),
    )


def assert_equal(heads: Heads, kernels: NativeKernels) -> None:
    q, k, v = heads.expected()
    heads.run(kernels)
    assert torch.equal(heads.rotated, q)
    stored_k, stored_v = heads.stored()
    assert torch.equal(stored_k, k)
    assert torch.equal(stored_v, v)


def assert_near(heads: Heads, kernels: NativeKernels) -> None:
    """Where the normalised value rounds the other way, up to one unit each of three roundings."""
    q, k, v = heads.expected()
    heads.run(kernels)
    stored_k, stored_v = heads.stored()
    assert torch.equal(stored_v, v)
    for ours, theirs in ((heads.rotated, q), (stored_k, k)):
        tolerance = 2 * ULP[heads.qkv.dtype]
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        if heads.qkv.dtype is torch.bfloat16:
            assert (ours != theirs).float().mean() < 0.02


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 40, 64, 128])
@pytest.mark.parametrize(("num_tokens", "block_size"), [(1, 16), (5, 8), (77, 64)])
def test_rotation_and_kv_write(
    kernels: NativeKernels, dtype: torch.dtype, head_dim: int, num_tokens: int, block_size: int
) -> None:
    heads = make_heads(num_tokens, dtype, head_dim=head_dim, block_size=block_size)
    assert_equal(heads, kernels)
    num_written = num_tokens * 2 * 2 * head_dim
    assert int((~heads.pages.isnan()).sum()) == num_written, "nothing else is written"


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_offset", [None, 1.0])
@pytest.mark.parametrize("rotary_dim", [None, 16, 0])
@pytest.mark.parametrize("head_dim", [40, 128])
def test_rotation_with_normalised_heads(
    kernels: NativeKernels,
    dtype: torch.dtype,
    head_dim: int,
    rotary_dim: int | None,
    norm_offset: float | None,
) -> None:
    heads = make_heads(
        33,
        dtype,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        normalises=True,
        norm_offset=norm_offset,
    )
    assert_near(heads, kernels)


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), PARTS)
def test_rotation_of_a_part_of_each_head(
    kernels: NativeKernels, dtype: torch.dtype, head_dim: int, rotary_dim: int
) -> None:
    assert_equal(make_heads(37, dtype, head_dim=head_dim, rotary_dim=rotary_dim), kernels)
    assert_near(
        make_heads(37, dtype, head_dim=head_dim, rotary_dim=rotary_dim, normalises=True), kernels
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_without_rotation_are_stored_unchanged(
    kernels: NativeKernels, dtype: torch.dtype
) -> None:
    heads = make_heads(21, dtype, head_dim=40)
    heads.rotation = None
    assert_equal(heads, kernels)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_may_lie_apart(kernels: NativeKernels, dtype: torch.dtype) -> None:
    together = make_heads(21, dtype, head_dim=40, normalises=True)
    together.run(kernels)
    apart = make_heads(21, dtype, head_dim=40, normalises=True)
    wide = torch.zeros(21, 7, 90, dtype=dtype)
    wide[..., 3:43] = apart.qkv.unflatten(1, (7, 40))
    q, k, v = wide[..., 3:43].split([3, 2, 2], dim=1)
    apart.split = lambda: (q, k, v)  # type: ignore[method-assign]
    apart.run(kernels)
    assert torch.equal(apart.rotated, together.rotated)
    assert torch.equal(apart.pages.nan_to_num(), together.pages.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_alone_store_nothing(kernels: NativeKernels, dtype: torch.dtype) -> None:
    heads = make_heads(21, dtype, head_dim=40, normalises=True)
    heads.run(kernels)
    expected = heads.rotated
    heads.pages.fill_(torch.nan)
    heads.run(kernels, stores=False)
    assert torch.equal(heads.rotated, expected)
    assert bool(heads.pages.isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_smaller_values_have_zeros_behind_them(kernels: NativeKernels, dtype: torch.dtype) -> None:
    heads = make_heads(21, dtype, head_dim=40)
    q, k, v = heads.split()
    heads.split = lambda: (q, k, v[..., :23])  # type: ignore[method-assign]
    heads.layer.v_head_dim = 23
    heads.run(kernels)
    _, stored = heads.stored()
    assert torch.equal(stored[..., :23], v[..., :23])
    assert not stored[..., 23:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [None, 16, 48])
def test_rotation_is_the_same_with_any_threads_and_tokens(
    library: NativeLibrary, kernels: NativeKernels, dtype: torch.dtype, rotary_dim: int | None
) -> None:
    heads = make_heads(90, dtype, rotary_dim=rotary_dim, normalises=True)
    heads.run(kernels)
    expected, pages = heads.rotated, heads.pages.clone()
    for threads in (1, 5):
        heads.pages.fill_(torch.nan)
        heads.run(NativeKernels(library, kernels.isa, threads))
        assert torch.equal(heads.rotated, expected)
        assert torch.equal(heads.pages.nan_to_num(), pages.nan_to_num())
    one = make_heads(90, dtype, rotary_dim=rotary_dim, normalises=True)
    one.qkv, one.positions, one.slots = one.qkv[7:8], one.positions[7:8], one.slots[7:8]
    one.run(kernels)
    assert torch.equal(one.rotated[0], expected[7])


def test_wrong_arguments_are_named(kernels: NativeKernels) -> None:
    heads = make_heads(3, torch.float32)
    heads.qkv = heads.qkv[:2]
    with pytest.raises(ValueError, match=r"q is \(2, 3, 64\), but must be \(3, 3, 64\)"):
        heads.run(kernels)
    for width in (3, 66):
        heads = make_heads(3, torch.float32)
        heads.rotation = Rotation(Angles(torch.zeros(400, width), heads.positions, torch.float32))
        with pytest.raises(ValueError, match=f"rotary_dim is {width}, .* an even number up to 64"):
            heads.run(kernels)
