"""LayerNorm in the interpreter: the torch function up to the order of its sums."""

import pytest
import torch

pytest.importorskip("triton")

from quire.kernels import layer_norm as reference
from quire.kernels.triton.layer_norm import layer_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 3), (3, 34), (2, 2, 1026), (0, 16), (5, 768)]


def _random(*shape, dtype, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_torch(shape, has_bias, dtype):
    x = _random(*shape, dtype=dtype) * 3 + 2
    weight = _random(shape[-1], dtype=dtype, seed=2)
    bias = _random(shape[-1], dtype=dtype, seed=3) if has_bias else None
    found, expected = layer_norm(x, weight, bias, 1e-5), reference.layer_norm(x, weight, bias, 1e-5)
    tolerance = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-5)


def test_rows_may_lie_apart():
    wide, weight = _random(4, 3, 64, dtype=torch.float32), torch.ones(64)
    alone = layer_norm(wide[:, 1].contiguous(), weight, None, 1e-5)
    assert torch.equal(layer_norm(wide[:, 1], weight, None, 1e-5), alone)
    for row in range(4):
        assert torch.equal(layer_norm(wide[row, 1], weight, None, 1e-5), alone[row])


def test_errors_name_the_argument_that_does_not_fit():
    x = torch.zeros(2, 5)
    with pytest.raises(ValueError, match=r"weight is \(4,\), .* needs \(5,\)"):
        layer_norm(x, torch.ones(4), None, 1e-5)
    with pytest.raises(ValueError, match=r"bias is \(4,\), .* needs \(5,\)"):
        layer_norm(x, torch.ones(5), torch.ones(4), 1e-5)
    with pytest.raises(ValueError, match="may be 16384 at most"):
        layer_norm(torch.zeros(1, 20000), torch.ones(20000), None, 1e-5)
