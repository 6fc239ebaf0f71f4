"""What int8 pages keep of a vector, and the torch backend over them.

The oracle attends what the codes stand for, in float64, so bounds are those of the other dtypes.
Bytes that no sequence wrote are 0xff: a scale of NaN, codes of -1.
"""

import pytest
import torch
from tests.attention.paged import PagedStep, kv_of, make_spec
from tests.attention.test_torch_paged import EDGES, OPTIONS

from quire.attention.kv_format import rotate_vectors
from quire.attention.quantized_kv import INT8
from quire.attention.torch_paged import TorchPagedAttention

LARGEST_CODE = 127
quantize_vectors, widen_codes = INT8.values.encode, INT8.values.decode
kept = INT8.values.rounded
TOLERANCE = 1e-5
"""Queries and keys are rotated in fp32 by the backend and by what the oracle is given."""


class QuantizedStep(PagedStep):
    """Pages are filled through the backend, token by token or in chunks; what the oracle is given
    is what the codes stand for."""

    def _random(self, generator, *shape):
        return torch.randn(*shape, generator=generator).to(self.q_dtype)

    def fill(self, contexts):
        """Write as the backend does: a step of one chunk a sequence, whose outputs are dropped."""
        kept = [i for i, context in enumerate(contexts) if context]
        if kept:
            lens = list(contexts)
            self.run_all(lens, contexts, kept)

    def expected(self, layer, query_lens, contexts=None):
        form, k, v = kv_of(self.dtype), self.k, self.v
        try:
            self.k = [[form.rounded_keys(x) for x in parts] for parts in k]
            self.v = [[form.values.rounded(x) for x in parts] for parts in v]
            return super().expected(layer, query_lens, contexts)
        finally:
            self.k, self.v = k, v


def make_torch_step(specs, contexts, **options):
    specs = specs if isinstance(specs, tuple) else (specs,)
    return QuantizedStep(TorchPagedAttention(), specs, contexts, dtype=torch.int8, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 24, 64, 128])
def test_codes_are_the_nearest(dtype, size):
    x = torch.randn(300, 3, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    codes, scales = quantize_vectors(x)
    assert scales.dtype == torch.bfloat16 and scales.shape == x.shape[:2]
    # Half a code, which a scale that was rounded down by 2^-9 adds nothing to.
    bound = 0.5001 * scales.float()[..., None]
    assert ((widen_codes(codes, scales) - x.float()).abs() <= bound).all()
    assert (codes.abs().amax(-1) >= LARGEST_CODE - 1).all()


def test_a_vector_of_zeros_is_exact_and_one_without_bounds_is_nan():
    x = torch.randn(5, 8)
    x[1] = 0.0
    x[2, 3], x[3, 0], x[4, 7] = torch.inf, torch.nan, -torch.inf
    wide = widen_codes(*quantize_vectors(x))
    assert torch.equal(wide[1], x[1])
    assert wide[0].isfinite().all() and wide[2:].isnan().all()


@pytest.mark.parametrize("largest", [1e-45, 1e-40, 1e-38, 1e-30, 1e30, 3.4e38])
def test_any_magnitude_has_a_scale(largest):
    x = torch.tensor([1.0, -0.5, 0.25, 0.0]) * largest
    wide = widen_codes(*quantize_vectors(x))
    bound = max(largest / 128, 2e-38)
    assert wide.isfinite().all() and ((wide - x).abs() <= bound).all()


def test_a_scale_is_the_vectors_own():
    x = torch.randn(40, 2, 16)
    codes, scales = quantize_vectors(x)
    for part in (slice(0, 7), slice(7, 8), slice(8, 40)):
        some_codes, some_scales = quantize_vectors(x[part])
        assert torch.equal(codes[part], some_codes) and torch.equal(scales[part], some_scales)


@pytest.mark.parametrize("size", [1, 2, 18, 40, 64, 80, 128, 256])
def test_a_rotation_is_orthogonal_and_undoes_itself(size):
    generator = torch.Generator().manual_seed(size)
    q, k = torch.randn(2, 50, size, generator=generator)
    torch.testing.assert_close(rotate_vectors(rotate_vectors(k)), k, atol=1e-5, rtol=1e-5)
    products = rotate_vectors(q) @ rotate_vectors(k).T
    torch.testing.assert_close(products, q @ k.T, atol=2e-4, rtol=1e-5)


def test_a_rotation_leaves_more_of_keys_with_outliers():
    """Of a constant on few channels, as biases of keys are, which changes no softmax."""
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(500, 64, generator=generator)
    k[:, 5] += 16.0
    k[:, 40] -= 24.0
    errors = [
        (kept(k) - k).square().mean(),
        (kept(rotate_vectors(k)) - rotate_vectors(k)).square().mean(),
    ]
    assert errors[1] < errors[0] / 6


@pytest.mark.parametrize("name", OPTIONS)
def test_torch_attends_what_is_stored(name):
    contexts = [*EDGES, 1, 33, 600, 16, 301, 40]
    query_lens = [1] * len(EDGES) + [1, 33, 590, 2, 17, 1]
    make_torch_step(make_spec(**OPTIONS[name]), contexts).check(query_lens, TOLERANCE)


@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [8, 64])
def test_torch_in_any_model_dtype(q_dtype, block_size):
    specs = (make_spec(6, 2, 40), make_spec(6, 2, 40, window=50))
    step = make_torch_step(
        specs, [5, 64, 200], q_dtype=q_dtype, block_size=block_size, padding_bytes=64
    )
    step.check([1, 1, 60], tolerance=2.0**-8)


def test_a_block_takes_a_byte_an_element_and_two_for_each_scale():
    spec = make_spec(12, 4, 64)
    form = TorchPagedAttention.page_format(spec, 16, kv_of(torch.int8))
    assert form.bytes_per_layer == 16 * 4 * 2 * (64 + 2)
    plain = TorchPagedAttention.page_format(spec, 16, kv_of(torch.bfloat16))
    assert form.bytes_per_layer <= 0.53 * plain.bytes_per_layer
