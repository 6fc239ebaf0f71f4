"""A row's results are the same to the bit however many rows there are."""

import pytest
import torch
from torch.nn import functional

from quire.kernels.whole_vectors import in_whole_vectors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [torch.sigmoid, functional.softplus, functional.silu])
def test_company_changes_no_bit(function, dtype):
    x = (torch.randn(9, 7, generator=torch.Generator().manual_seed(3)) * 4).to(dtype)
    whole = in_whole_vectors(function, x)
    torch.testing.assert_close(whole, function(x))
    for first in range(9):
        for last in range(first + 1, 10):
            part = x[first:last]
            assert torch.equal(in_whole_vectors(function, part), whole[first:last])
