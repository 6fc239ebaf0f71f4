"""Layers of towers: native kernels and torch agree, and pieces change no bit."""

from pathlib import Path

import pytest
import torch
from tests.models.vision import internvl_files, pixtral_files, qwen3_vl_files
from tests.models.vision.idefics3_files import save_smolvlm
from tests.models.vision.towers import load

from quire.attention.native_whole import NativeWholeAttention
from quire.kernels.cpu.selection import select_kernels
from quire.models.vision.slices import EncoderLayer, attend, native_attend
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


FAMILIES = {
    "smolvlm": save_smolvlm,
    "mistral3": lambda folder: pixtral_files.save("mistral3", folder),
    "internvl": internvl_files.save,
    "qwen3_vl": lambda folder: qwen3_vl_files.save("qwen3_vl", folder),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_native_programs_compute_all_layers(family: str, tmp_path: Path) -> None:
    """A row of a program has the same bits in any piece, and is near to torch's."""
    model = FAMILIES[family](tmp_path)
    tower = load(model, tmp_path, torch.bfloat16, "auto")
    plain = load(model, tmp_path, torch.bfloat16, "torch")
    pairs = [
        pair
        for pair in zip(tower.modules(), plain.modules(), strict=True)
        if isinstance(pair[0], EncoderLayer)
    ]
    assert pairs
    if select_kernels("auto", 1, torch.bfloat16, takes_fewer=False) is None:
        return
    hidden, attended = torch.randn(2, 100, pairs[0][0].hidden_size).bfloat16()
    for native, by_torch in pairs:
        assert isinstance(native, EncoderLayer) and isinstance(by_torch, EncoderLayer)
        assert native.attend is not attend and by_torch.attend is attend
        assert by_torch.projecting is by_torch.finishing is None
        for program, layer, rows in (
            (native.projecting, by_torch.project, (hidden,)),
            (native.finishing, by_torch.finish, (hidden, attended)),
        ):
            assert program is not None
            with torch.inference_mode():
                whole, expected = program.run(*rows), layer(*rows).float()
                parts = [program.run(*(each[part] for each in rows)) for part in PARTS]
            assert torch.equal(whole, torch.cat(parts))
            assert (whole - expected).abs().max() <= 2e-2 * expected.abs().max()


PARTS = (slice(0, 1), slice(1, 64), slice(64, 100))
