"""Attention of towers: native kernels and torch agree, and pieces change no bit."""

import pytest
import torch

from quire.attention.native_whole import NativeWholeAttention
from quire.kernels.cpu.selection import select_kernels
from quire.models.vision.slices import AttendingModule, attend, native_attend, use_kernels
from quire.models.vision.vision_tower import finish

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def inputs(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(shape[0])
    q, k, v = torch.randn(3, *shape, generator=generator).to(dtype)
    return q, k, v


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 2), (37, 4, 10), (300, 3, 72), (515, 2, 80)], ids=str)
def test_native_attention_equals_torch(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    kernels = select_kernels("auto", 2, dtype, takes_fewer=False)
    if kernels is None:
        return
    q, k, v = inputs(shape, dtype)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * 0.2
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.float())
    for found in (finish(native_attend(kernels)(q, k, v, 0.2)), finish(attend(q, k, v, 0.2))):
        assert found.dtype == dtype
        assert found.shape == shape
        assert (found.float() - expected).abs().max() < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_native_pieces_change_no_bit(dtype: torch.dtype) -> None:
    found = []
    for num_threads in (1, 2):
        kernels = select_kernels("auto", num_threads, dtype, takes_fewer=False)
        if kernels is None:
            return
        q, k, v = inputs((300, 3, 72), dtype)
        keys = NativeWholeAttention(kernels, k, v, 0.1)
        found += [torch.cat([keys(piece) for piece in q.split(size)]) for size in (300, 64, 7)]
        found.append(torch.cat([keys(q[:5].split(1)[place]) for place in range(5)]))
    assert all(torch.equal(each, found[0][: len(each)]) for each in found)


def test_layers_attend_by_torch_until_they_get_kernels() -> None:
    layer = AttendingModule()
    use_kernels(layer, None)
    assert layer.attend is attend
    kernels = select_kernels("auto", 1, torch.float32, takes_fewer=False)
    use_kernels(layer, kernels)
    assert (layer.attend is attend) == (kernels is None)
