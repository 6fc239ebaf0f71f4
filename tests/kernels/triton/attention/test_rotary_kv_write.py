"""Rotation and write in the interpreter: without norms the bits of `rotate` and stores by index.

Pages begin as NaN, so that whatever is written where nothing belongs is seen.
"""

import pytest
import torch

pytest.importorskip("triton")

from quire.kernels.rotary import Angles, Rotation, rotate
from quire.kernels.triton.attention.quantized_kv import KVPages
from quire.kernels.triton.attention.rotary_kv_write import rotate_and_write

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [
    (1, 1, 1, 2, 8),
    (3, 7, 1, 80, 16),
    (4, 4, 2, 64, 32),
    (2, 14, 2, 12, 8),
    (2, 3, 3, 96, 8),
]
"""T, Hq, Hkv, D, B"""
PARTS = [(64, 16), (64, 32), (64, 48), (128, 96), (80, 20), (12, 2)]
"""D, and how many elements of a head rotate."""
NUM_BLOCKS = 5


class Step:
    """q, k, v as views of one fused projection, and pages that lie apart as those of a layer do."""

    def __init__(self, shape, dtype, kv_dtype=None, seed=0, rotary_dim=None):
        self.num_tokens, num_heads, self.num_kv_heads, self.size, self.block_size = shape
        generator = torch.Generator().manual_seed(seed)
        self.parts = (num_heads, self.num_kv_heads, self.num_kv_heads)
        fused = torch.randn(self.num_tokens, sum(self.parts), self.size, generator=generator)
        self.fused = fused.to(dtype)
        page = 2 * self.num_kv_heads * self.block_size * self.size
        pages = torch.full((NUM_BLOCKS, page + 32), torch.nan, dtype=kv_dtype or dtype)
        self.pages = pages
        self.kv = pages[:, 16:-16].view(
            NUM_BLOCKS, 2, self.num_kv_heads, self.block_size, self.size
        )
        num_slots = NUM_BLOCKS * self.block_size
        self.slots = torch.randperm(num_slots, generator=generator)[: self.num_tokens]
        table = torch.randn(30, rotary_dim or self.size, generator=generator)
        positions = torch.randint(30, (self.num_tokens,), generator=generator)
        self.angles = Angles(table, positions, dtype)
        norms = torch.randn(2, self.size, generator=generator).to(dtype)
        self.norms = norms[0], norms[1]

    def qkv(self):
        """Fresh ones each time: rotations are in place."""
        return self.fused.clone().split(self.parts, dim=1)

    def expected(self, rotation):
        """(q, kv) by the torch reference."""
        q, k, v = self.qkv()
        if rotation is not None:
            q, k = rotate(q, k, rotation)
        kv = self.kv.clone()
        for token, slot in enumerate(self.slots.tolist()):
            if slot >= 0:
                block, offset = divmod(slot, self.block_size)
                kv[block, 0, :, offset] = k[token].to(kv.dtype)
                kv[block, 1, :, offset] = v[token].to(kv.dtype)
        return q, kv


def assert_same_bits(found, expected):
    assert torch.equal(
        found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rotates_and_writes_the_bits_of_torch(shape, dtype):
    step = Step(shape, dtype)
    rotation = Rotation(step.angles)
    expected_q, expected_kv = step.expected(rotation)
    q, k, v = step.qkv()
    assert rotate_and_write(q, k, v, rotation, KVPages(step.kv), step.slots) is q
    assert_same_bits(q, expected_q)
    assert_same_bits(step.kv, expected_kv)
    assert_same_bits(k, step.qkv()[1])
    assert step.pages[:, :16].isnan().all() and step.pages[:, -16:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES[1:4])
def test_norms_each_head_first(shape, dtype):
    step = Step(shape, dtype)
    rotation = Rotation(step.angles, *step.norms, eps=1e-6)
    expected_q, expected_kv = step.expected(rotation)
    q, k, v = step.qkv()
    rotate_and_write(q, k, v, rotation, KVPages(step.kv), step.slots)
    # The order of the sum of squares may move a quotient by one step, and two products with it.
    tolerance = 6 * torch.finfo(dtype).eps
    torch.testing.assert_close(q, expected_q, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(step.kv, expected_kv, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [None, 1.0])
@pytest.mark.parametrize("is_turned", [False, True])
def test_norms_with_an_offset_and_without_angles(is_turned, offset, dtype):
    step = Step((4, 7, 1, 80, 16), dtype)
    angles = step.angles if is_turned else None
    for norms in (step.norms, (step.norms[0], None)):
        step.pages.fill_(torch.nan)
        rotation = Rotation(angles, *norms, eps=1e-6, norm_offset=offset)
        expected_q, expected_kv = step.expected(rotation)
        q, k, v = step.qkv()
        rotate_and_write(q, k, v, rotation, KVPages(step.kv), step.slots)
        tolerance = 6 * torch.finfo(dtype).eps
        torch.testing.assert_close(q, expected_q, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(
            step.kv, expected_kv, rtol=tolerance, atol=tolerance, equal_nan=True
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "rotary_dim"), PARTS)
def test_rotates_a_part_of_each_head(size, rotary_dim, dtype):
    step = Step((3, 7, 2, size, 16), dtype, rotary_dim=rotary_dim)
    rotation = Rotation(step.angles)
    expected_q, expected_kv = step.expected(rotation)
    q, k, v = step.qkv()
    rotate_and_write(q, k, v, rotation, KVPages(step.kv), step.slots)
    assert_same_bits(q, expected_q)
    assert_same_bits(step.kv, expected_kv)
    step.pages.fill_(torch.nan)
    rotation = Rotation(step.angles, *step.norms, eps=1e-6)
    expected_q, expected_kv = step.expected(rotation)
    q, k, v = step.qkv()
    rotate_and_write(q, k, v, rotation, KVPages(step.kv), step.slots)
    tolerance = 6 * torch.finfo(dtype).eps
    torch.testing.assert_close(q, expected_q, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(step.kv, expected_kv, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_rotation_q_is_untouched(dtype):
    step = Step(SHAPES[1], dtype)
    expected_q, expected_kv = step.expected(None)
    q, k, v = step.qkv()
    assert rotate_and_write(q, k, v, None, KVPages(step.kv), step.slots) is q
    assert_same_bits(q, expected_q)
    assert_same_bits(step.kv, expected_kv)


@pytest.mark.parametrize("is_rotated", [True, False])
def test_q_goes_where_it_is_asked_to(is_rotated):
    step = Step(SHAPES[2], torch.bfloat16)
    rotation = Rotation(step.angles) if is_rotated else None
    expected_q, _ = step.expected(rotation)
    q, k, v = step.qkv()
    out = torch.empty(q.shape, dtype=q.dtype)
    assert rotate_and_write(q, k, v, rotation, KVPages(step.kv), step.slots, out=out) is out
    assert_same_bits(out, expected_q)
    assert_same_bits(q, step.qkv()[0])


def test_padding_is_not_written():
    step = Step((4, 4, 2, 64, 32), torch.float32)
    step.slots[1], step.slots[3] = -1, -1
    rotation = Rotation(step.angles)
    _, expected_kv = step.expected(rotation)
    rotate_and_write(*step.qkv(), rotation, KVPages(step.kv), step.slots)
    assert_same_bits(step.kv, expected_kv)


@pytest.mark.parametrize("rotary_dim", [80, 20])
@pytest.mark.parametrize("normed", [False, True])
def test_a_token_has_the_same_bits_in_any_batch(normed, rotary_dim):
    step = Step(SHAPES[1], torch.bfloat16, rotary_dim=rotary_dim)
    norms = (*step.norms, 1e-6) if normed else ()
    q, k, v = step.qkv()
    rotate_and_write(q, k, v, Rotation(step.angles, *norms), KVPages(step.kv), step.slots)
    together = step.kv.clone()
    step.pages.fill_(torch.nan)
    for t, (q_t, k_t, v_t) in enumerate(zip(*step.qkv(), strict=True)):
        angles = Angles(step.angles.table, step.angles.positions[t : t + 1], torch.bfloat16)
        slot, alone = step.slots[t : t + 1], q_t[None]
        kv = KVPages(step.kv)
        rotate_and_write(alone, k_t[None], v_t[None], Rotation(angles, *norms), kv, slot)
        assert_same_bits(alone[0], q[t])
    assert_same_bits(step.kv, together)


def test_pages_may_have_another_dtype():
    step = Step(SHAPES[2], torch.float32, kv_dtype=torch.float16)
    rotation = Rotation(step.angles)
    _, expected_kv = step.expected(rotation)
    rotate_and_write(*step.qkv(), rotation, KVPages(step.kv), step.slots)
    assert_same_bits(step.kv, expected_kv)


def test_no_tokens_are_no_launch():
    step = Step((0, 4, 2, 64, 8), torch.float32)
    q, k, v = step.qkv()
    assert (
        rotate_and_write(q, k, v, Rotation(step.angles), KVPages(step.kv), step.slots).shape
        == q.shape
    )
    assert step.pages.isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(4, 3, 64)}, r"k is \(4, 3, 64\) .* need \(4, 2, 64\)"),
        ({"v": torch.zeros(4, 2, 64).half()}, "v is torch.float16 on cpu, but must be as q"),
        ({"v": torch.zeros(4, 64, 2).mT}, "last dimension of q, k and v"),
        (
            {"pages": KVPages(torch.zeros(5, 2, 32, 2, 64).transpose(2, 3))},
            "each page of kv must be contiguous",
        ),
        (
            {"slot_mapping": torch.zeros(4, dtype=torch.int32)},
            r"slot_mapping is \(4,\) torch.int32",
        ),
        ({"out": torch.zeros(4, 2, 64)}, r"out is \(4, 2, 64\), but must be as q, \(4, 4, 64\)"),
    ],
)
def test_errors_name_the_argument_that_does_not_fit(change, message):
    step = Step((4, 4, 2, 64, 32), torch.float32)
    q, k, v = step.qkv()
    arguments = {"q": q, "k": k, "v": v, "pages": KVPages(step.kv), "slot_mapping": step.slots}
    with pytest.raises(ValueError, match=message):
        rotate_and_write(rotation=Rotation(step.angles), **{**arguments, **change})


@pytest.mark.parametrize(
    ("rotation", "message"),
    [
        ((torch.zeros(9, 66), torch.zeros(4, dtype=torch.int64)), r"angles is \(9, 66\)"),
        ((torch.zeros(9, 31), torch.zeros(4, dtype=torch.int64)), r"angles is \(9, 31\)"),
        ((torch.zeros(9, 64), torch.zeros(3, dtype=torch.int64)), r"positions are \(3,\)"),
        ((torch.zeros(9, 64), torch.zeros(4, dtype=torch.int32)), "torch.int32, but must be"),
    ],
)
def test_angles_that_do_not_fit_are_named(rotation, message):
    step = Step((4, 4, 2, 64, 32), torch.float32)
    angles = Angles(*rotation, torch.float32)
    with pytest.raises(ValueError, match=message):
        rotate_and_write(*step.qkv(), Rotation(angles), KVPages(step.kv), step.slots)


def test_norms_that_do_not_fit_are_named():
    step = Step((4, 4, 2, 64, 32), torch.float32)
    norms = torch.ones(64), torch.ones(32)
    with pytest.raises(ValueError, match=r"k_norm is \(32,\)"):
        rotate_and_write(*step.qkv(), Rotation(step.angles, *norms), KVPages(step.kv), step.slots)
