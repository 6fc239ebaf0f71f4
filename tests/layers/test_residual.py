"""The residual stream: sums, and norms that the linear that reads them computes."""

import pytest
import torch

from quire.formats.dense import DenseMethod, TritonDenseMethod
from quire.kernels.unnormed_rows import UnnormedRows
from quire.layers.mlp import MLP
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.operator_module import use_operators
from quire.layers.residual import ResidualStream

SIZE, STORAGE = 48, {"dtype": torch.bfloat16, "device": torch.device("cpu")}


def random(*shape, seed=0):
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(torch.bfloat16)


@pytest.fixture
def block():
    """An MLP whose linears Triton multiplies, its norm, and Triton's operators."""
    pytest.importorskip("triton")
    from quire.kernels.triton.operators import TritonOperators

    mlp, norm = MLP(SIZE, 20, bias=False, **STORAGE), RMSNorm(SIZE, 1e-6, **STORAGE)
    for seed, parameter in enumerate((*mlp.parameters(), *norm.parameters())):
        parameter.data = random(*parameter.shape, seed=seed)
    operators = TritonOperators()
    for linear in (mlp.gate_up_proj, mlp.down_proj):
        linear.method = TritonDenseMethod(operators)
    use_operators(norm, operators)
    return mlp, norm, operators


@pytest.mark.parametrize("num_added", [0, 1, 2])
def test_a_linear_norms_a_single_row_to_the_same_bits(block, num_added):
    mlp, norm, operators = block
    outputs, totals = [], []
    with torch.inference_mode():
        for is_fused in (False, True):
            stream = ResidualStream(random(1, SIZE, seed=7), operators)
            for seed in range(num_added):
                stream.add(random(1, SIZE, seed=8 + seed), 0.3)
            read = stream.input_of(mlp, norm) if is_fused else stream.normed(norm)
            assert isinstance(read, UnnormedRows) == is_fused
            outputs.append(mlp(read))
            totals.append(stream.read())
    assert torch.equal(*outputs)
    assert torch.equal(*totals)


def test_other_rows_and_modules_get_their_norm(block):
    mlp, norm, operators = block
    with torch.inference_mode():
        two = ResidualStream(random(2, SIZE), operators)
        assert torch.equal(two.input_of(mlp, norm), two.normed(norm))
        row = ResidualStream(random(1, SIZE), operators)
        for reader in (norm, LayerNorm(SIZE, 1e-6, **STORAGE)):
            assert isinstance(row.input_of(reader, norm), torch.Tensor)
        assert isinstance(row.input_of(mlp, LayerNorm(SIZE, 1e-6, **STORAGE)), torch.Tensor)
        mlp.gate_up_proj.adapter = lambda x, output: output
        assert isinstance(row.input_of(mlp, norm), torch.Tensor), "an adapter reads the norm, too"
        mlp.gate_up_proj.adapter = None
        assert isinstance(row.input_of(mlp, norm), UnnormedRows)
        mlp.gate_up_proj.method = DenseMethod()
        assert isinstance(row.input_of(mlp, norm), torch.Tensor)
