"""What stands between the linears, against torch and bitwise against itself.

Products and sums are rounded one by one, as torch does, so rotation and copies are equal to the
bit. The mean of RMSNorm is summed in another order than torch's: relative error 1e-6 in the scale,
which in bf16 moves few results by one unit in the last place.
"""

import ctypes
from dataclasses import dataclass

import pytest
import torch

from quire.kernels.activations import ActivationFunction, Gating, gated
from quire.kernels.cpu import abi, elementwise
from quire.kernels.cpu.library import NativeKernels, NativeLibrary
from quire.kernels.rms_norm import rms_norm
from quire.kernels.rotary import rotary

DTYPES = [torch.float32, torch.bfloat16]
PARTS = [(64, 16), (64, 32), (64, 48), (128, 32), (128, 64), (128, 96), (80, 20), (12, 2)]
"""D, and how many elements of a head rotate."""
ULP = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7}


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 64, 100, 768, 1027])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_rms_norm(kernels: NativeKernels, dtype: torch.dtype, size: int, num_rows: int) -> None:
    x = random(num_rows, size + 3, dtype=dtype)[:, :size] * 5  # rows lie apart
    weight = random(size, dtype=dtype, seed=1) + 1
    wide = x.double()
    exact = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    ours = elementwise.rms_norm(kernels, x, weight, 1e-5)
    torch.testing.assert_close(ours.double(), exact, rtol=ULP[dtype], atol=1e-6)
    differs = ours != rms_norm(x, weight, 1e-5)
    if dtype is torch.bfloat16:
        assert differs.float().mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_a_row_is_the_same_in_any_company(
    library: NativeLibrary, kernels: NativeKernels, dtype: torch.dtype
) -> None:
    x, weight = random(70, 500, dtype=dtype), random(500, dtype=dtype, seed=1)
    crowd = elementwise.rms_norm(kernels, x, weight, 1e-6)
    for threads in (1, 5):
        other = NativeKernels(library, kernels.isa, threads)
        assert torch.equal(elementwise.rms_norm(other, x, weight, 1e-6), crowd)
    for row in (0, 33, 69):
        alone = elementwise.rms_norm(kernels, x[row : row + 1], weight, 1e-6)
        assert torch.equal(alone[0], crowd[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 17), (3, 100), (40, 1027)])
def test_rms_norm_with_an_offset(
    kernels: NativeKernels, dtype: torch.dtype, offset: float, num_rows: int, size: int
) -> None:
    x = random(num_rows, size + 3, dtype=dtype)[:, :size] * 5
    weight = random(size, dtype=dtype, seed=1)
    ours = elementwise.rms_norm(kernels, x, weight, 1e-5, offset)
    expected = rms_norm(x, weight, 1e-5, offset)
    torch.testing.assert_close(ours, expected, rtol=ULP[dtype], atol=1e-6)
    if dtype is torch.bfloat16:
        assert (ours != expected).float().mean() < 0.01
    for row in range(0, num_rows, 13):
        alone = elementwise.rms_norm(kernels, x[row : row + 1], weight, 1e-5, offset)
        assert torch.equal(alone[0], ours[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (3, 100), (40, 1027)])
def test_scale_is_torchs_to_the_bit(
    kernels: NativeKernels, dtype: torch.dtype, num_rows: int, size: int
) -> None:
    x = random(num_rows, size + 3, dtype=dtype)[:, :size]
    assert torch.equal(elementwise.scale(kernels, x, 0.22), x * 0.22)
    residual = random(num_rows, size + 5, dtype=dtype, seed=1)[:, :size]
    expected = residual + x * 0.22
    assert elementwise.scale(kernels, x, 0.22, residual) is residual
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (3, 100), (40, 1027)])
def test_gelu_mul(kernels: NativeKernels, dtype: torch.dtype, num_rows: int, size: int) -> None:
    gate_up = random(num_rows, 2 * size + 3, dtype=dtype)[:, : 2 * size] * 4
    ours = elementwise.gelu_mul(kernels, gate_up)
    torch.testing.assert_close(
        ours, gated(gate_up, Gating(ActivationFunction.GELU_TANH)), rtol=2 * ULP[dtype], atol=1e-5
    )
    for row in range(0, num_rows, 13):
        alone = elementwise.gelu_mul(kernels, gate_up[row : row + 1])
        assert torch.equal(alone[0], ours[row])
    far = torch.tensor([[-300.0, 300.0, 0.0, 2.0, 2.0, 2.0]], dtype=dtype)
    assert elementwise.gelu_mul(kernels, far).tolist() == [[0.0, 600.0, 0.0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_embed(kernels: NativeKernels, dtype: torch.dtype, size: int) -> None:
    table = random(50, size, dtype=dtype)
    for num_tokens in (1, 2, 300):
        token_ids = torch.randint(50, (num_tokens,), generator=torch.Generator().manual_seed(2))
        assert torch.equal(elementwise.embed(kernels, table, token_ids), table[token_ids])


@dataclass
class Heads:
    """What a test rotates: T tokens at scattered positions, stored at scattered slots."""

    qkv: torch.Tensor
    pages: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    table: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor] | None
    layer: abi.AttentionLayer

    def run(self, kernels: NativeKernels) -> None:
        """Rotates qkv in place and fills pages."""
        group = abi.KVGroupStep(slot_mapping=self.slots.data_ptr())
        step = abi.Step(num_tokens=len(self.positions), positions=self.positions.data_ptr())
        step.groups = ctypes.addressof(group)
        rotation = abi.Rotary(
            table=self.table.data_ptr(), norm_eps=1e-6, rotary_dim=self.table.shape[1]
        )
        if self.norms is not None:
            rotation.q_norm, rotation.k_norm = (norm.data_ptr() for norm in self.norms)
        elementwise.rotate_and_write_kv(kernels, self.layer, rotation, step, self.qkv)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k [T, heads, D] as torch rotates them, and v."""
        layer, dtype = self.layer, self.qkv.dtype
        heads = self.qkv.unflatten(1, (-1, layer.head_dim))
        num_kv = layer.num_kv_heads
        q, k, v = heads.split([layer.num_heads, num_kv, num_kv], dim=1)
        if self.norms is not None:
            q, k = (rms_norm(x, norm, 1e-6) for x, norm in zip((q, k), self.norms, strict=True))
        cos, sin = self.table[self.positions].to(dtype).chunk(2, dim=-1)
        q, k = rotary(q, k, torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1))
        return q, k, v.clone()

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
) -> Heads:
    """rotary_dim: how many elements of a head rotate; None: all."""
    num_heads, num_kv_heads, num_blocks = 3, 2, 64 + 2 * num_tokens // block_size
    generator = torch.Generator().manual_seed(num_tokens)
    pages = torch.full((num_blocks, 2 * num_kv_heads * block_size * head_dim), torch.nan)
    pages = pages.to(dtype)
    norms = None
    if normalises:
        norms = (random(head_dim, dtype=dtype, seed=5), random(head_dim, dtype=dtype, seed=6))
    num_pairs = (rotary_dim or head_dim) // 2
    angles = torch.outer(torch.arange(400.0), torch.rand(num_pairs, generator=generator))
    return Heads(
        qkv=random(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype),
        pages=pages,
        positions=torch.randint(400, (num_tokens,), generator=generator),
        slots=torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens],
        table=torch.cat((angles.cos(), angles.sin()), dim=-1),
        norms=norms,
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 40, 64, 128])
@pytest.mark.parametrize(("num_tokens", "block_size"), [(1, 16), (5, 8), (77, 64)])
def test_rotation_and_kv_write(
    kernels: NativeKernels, dtype: torch.dtype, head_dim: int, num_tokens: int, block_size: int
) -> None:
    heads = make_heads(num_tokens, dtype, head_dim=head_dim, block_size=block_size)
    q, k, v = heads.expected()
    heads.run(kernels)
    assert torch.equal(heads.qkv[:, : 3 * head_dim].unflatten(1, (3, head_dim)), q)
    stored_k, stored_v = heads.stored()
    assert torch.equal(stored_k, k)
    assert torch.equal(stored_v, v)
    num_written = num_tokens * 2 * 2 * head_dim
    assert int((~heads.pages.isnan()).sum()) == num_written, "nothing else is written"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [40, 128])
def test_rotation_with_normalised_heads(
    kernels: NativeKernels, dtype: torch.dtype, head_dim: int
) -> None:
    heads = make_heads(33, dtype, head_dim=head_dim, normalises=True)
    q, k, v = heads.expected()
    heads.run(kernels)
    stored_k, stored_v = heads.stored()
    assert torch.equal(stored_v, v)
    for ours, theirs in ((heads.qkv[:, : 3 * head_dim].unflatten(1, (3, -1)), q), (stored_k, k)):
        # Where the normalised value rounds the other way, up to one unit each of three roundings.
        torch.testing.assert_close(ours, theirs, rtol=2 * ULP[dtype], atol=2 * ULP[dtype])
        if dtype is torch.bfloat16:
            assert (ours != theirs).float().mean() < 0.02


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), PARTS)
def test_rotation_of_a_part_of_each_head(
    kernels: NativeKernels, dtype: torch.dtype, head_dim: int, rotary_dim: int
) -> None:
    heads = make_heads(37, dtype, head_dim=head_dim, rotary_dim=rotary_dim)
    q, k, v = heads.expected()
    heads.run(kernels)
    assert torch.equal(heads.qkv[:, : 3 * head_dim].unflatten(1, (3, head_dim)), q)
    stored_k, stored_v = heads.stored()
    assert torch.equal(stored_k, k) and torch.equal(stored_v, v)
    heads = make_heads(37, dtype, head_dim=head_dim, rotary_dim=rotary_dim, normalises=True)
    q, k, v = heads.expected()
    heads.run(kernels)
    stored_k, stored_v = heads.stored()
    assert torch.equal(stored_v, v)
    for ours, theirs in ((heads.qkv[:, : 3 * head_dim].unflatten(1, (3, -1)), q), (stored_k, k)):
        torch.testing.assert_close(ours, theirs, rtol=2 * ULP[dtype], atol=2 * ULP[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [None, 16, 48])
def test_rotation_is_the_same_with_any_threads_and_tokens(
    library: NativeLibrary, kernels: NativeKernels, dtype: torch.dtype, rotary_dim: int | None
) -> None:
    heads = make_heads(90, dtype, rotary_dim=rotary_dim, normalises=True)
    before = heads.qkv.clone()
    heads.run(kernels)
    expected, pages = heads.qkv.clone(), heads.pages.clone()
    for threads in (1, 5):
        heads.qkv.copy_(before)
        heads.pages.fill_(torch.nan)
        heads.run(NativeKernels(library, kernels.isa, threads))
        assert torch.equal(heads.qkv, expected)
        assert torch.equal(heads.pages.nan_to_num(), pages.nan_to_num())
    one = make_heads(90, dtype, rotary_dim=rotary_dim, normalises=True)
    one.qkv, one.positions, one.slots = before[7:8].clone(), one.positions[7:8], one.slots[7:8]
    one.run(kernels)
    assert torch.equal(one.qkv[0], expected[7])


def test_wrong_arguments_are_named(kernels: NativeKernels) -> None:
    x = random(4, 8, dtype=torch.float32)
    with pytest.raises(ValueError, match="weight"):
        elementwise.rms_norm(kernels, x, random(9, dtype=torch.float32), 1e-5)
    with pytest.raises(ValueError, match=r"x is torch\.float16"):
        elementwise.rms_norm(kernels, x.half(), x[0].half(), 1e-5)
    with pytest.raises(ValueError, match="side by side"):
        elementwise.rms_norm(kernels, x.t(), x[:, 0], 1e-5)
    with pytest.raises(ValueError, match=r"added_to is \(4, 7\), but x is \(4, 8\)"):
        elementwise.scale(kernels, x, 2.0, x[:, :7])
    with pytest.raises(ValueError, match=r"gate_up is \(4, 7\), but must be"):
        elementwise.gelu_mul(kernels, x[:, :7])
    with pytest.raises(ValueError, match="token_ids"):
        elementwise.embed(kernels, x, torch.zeros(3, dtype=torch.int32))
    heads = make_heads(3, torch.float32)
    heads.qkv = heads.qkv[:2]
    with pytest.raises(ValueError, match="qkv"):
        heads.run(kernels)
    for width in (3, 66, 0):
        heads = make_heads(3, torch.float32)
        heads.table = torch.zeros(400, width)
        with pytest.raises(ValueError, match=f"rotary_dim is {width}, .* an even number up to 64"):
            heads.run(kernels)
