"""Stacked tensors of experts lent as tensors of each expert: both arrangements, in pieces."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.errors import CheckpointError
from quire.models.checkpoints.safetensors_files import SafetensorsFiles
from quire.models.checkpoints.unstacked import UnstackedCheckpoint

E, F, H = 3, 70, 5


def read(checkpoint: UnstackedCheckpoint, name: str) -> torch.Tensor:
    """The whole tensor, from pieces of 7 rows."""
    parts = []
    for start in range(0, checkpoint.shape(name)[0], 7):
        span = range(start, min(start + 7, checkpoint.shape(name)[0]))
        with checkpoint.rows(name, span) as rows:
            assert len(rows) == len(span)
            parts.append(rows.clone())
    return torch.cat(parts)


def saved(folder: Path, tensors: dict[str, torch.Tensor]) -> SafetensorsFiles:
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return SafetensorsFiles(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gate_then_up(tmp_path: Path, dtype: torch.dtype) -> None:
    both, down = torch.randn(E, 2 * F, H).to(dtype), torch.randn(E, H, F).to(dtype)
    other = torch.randn(4, 4)
    source = saved(
        tmp_path,
        {"l.experts.gate_up_proj": both, "l.experts.down_proj": down, "other.weight": other},
    )
    checkpoint = UnstackedCheckpoint(source)
    parts = ("gate_proj", "up_proj", "down_proj")
    assert checkpoint.names == {"other.weight"} | {
        f"l.experts.{expert}.{part}.weight" for expert in range(E) for part in parts
    }
    for expert in range(E):
        name = f"l.experts.{expert}."
        assert checkpoint.shape(f"{name}up_proj.weight") == (F, H)
        assert checkpoint.dtype(f"{name}up_proj.weight") == dtype
        assert torch.equal(read(checkpoint, f"{name}gate_proj.weight"), both[expert, :F])
        assert torch.equal(read(checkpoint, f"{name}up_proj.weight"), both[expert, F:])
        assert torch.equal(read(checkpoint, f"{name}down_proj.weight"), down[expert])
    assert torch.equal(read(checkpoint, "other.weight"), other)
    assert checkpoint.equal("l.experts.0.up_proj.weight", "l.experts.0.up_proj.weight")
    assert not checkpoint.equal("l.experts.0.up_proj.weight", "l.experts.1.up_proj.weight")


@pytest.mark.parametrize("shape", [(1 << 40, 0, 4), (65537, 2, 1)])
def test_more_experts_than_any_model_has_end_with_a_sentence(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    """A file of 200 bytes may claim them, where each has no numbers."""
    num_bytes = 4 * shape[0] * shape[1] * shape[2]
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, num_bytes]}
    header = json.dumps({"l.experts.gate_up_proj": entry}).encode()
    start = struct.pack("<Q", len(header)) + header
    (tmp_path / "model.safetensors").write_bytes(start + bytes(num_bytes))
    files = SafetensorsFiles(tmp_path)
    with pytest.raises(CheckpointError, match=rf"has {shape[0]} experts, but at most 65536"):
        UnstackedCheckpoint(files)


def test_transposed_with_alternating_gate_and_up(tmp_path: Path) -> None:
    both, down = torch.randn(E, H, 2 * F), torch.randn(E, F, H)
    biases, down_biases = torch.randn(E, 2 * F), torch.randn(E, H)
    source = saved(
        tmp_path,
        {
            "l.experts.gate_up_proj": both,
            "l.experts.gate_up_proj_bias": biases,
            "l.experts.down_proj": down,
            "l.experts.down_proj_bias": down_biases,
        },
    )
    checkpoint = UnstackedCheckpoint(source, is_transposed=True)
    for expert in range(E):
        name = f"l.experts.{expert}."
        assert checkpoint.shape(f"{name}gate_proj.weight") == (F, H)
        assert checkpoint.shape(f"{name}down_proj.weight") == (H, F)
        assert checkpoint.shape(f"{name}gate_proj.bias") == (F,)
        assert torch.equal(read(checkpoint, f"{name}gate_proj.weight"), both[expert].T[::2])
        assert torch.equal(read(checkpoint, f"{name}up_proj.weight"), both[expert].T[1::2])
        assert torch.equal(read(checkpoint, f"{name}down_proj.weight"), down[expert].T)
        assert torch.equal(read(checkpoint, f"{name}gate_proj.bias"), biases[expert, ::2])
        assert torch.equal(read(checkpoint, f"{name}up_proj.bias"), biases[expert, 1::2])
        assert torch.equal(read(checkpoint, f"{name}down_proj.bias"), down_biases[expert])


def test_a_tensor_of_another_rank_has_a_shape_that_no_linear_has(tmp_path: Path) -> None:
    source = saved(tmp_path, {"l.experts.down_proj": torch.zeros(E, 2, 3, 4)})
    checkpoint = UnstackedCheckpoint(source)
    assert checkpoint.shape("l.experts.0.down_proj.weight") == (2, 3, 4)


@pytest.mark.parametrize(
    "shape", [(E, 2 * F + 1, H), ()], ids=["an odd number of rows", "a number"]
)
def test_stacked_tensors_that_cannot_be_cut_keep_their_shape(tmp_path: Path, shape) -> None:
    checkpoint = UnstackedCheckpoint(saved(tmp_path, {"l.experts.gate_up_proj": torch.ones(shape)}))
    for name in checkpoint.names:
        assert checkpoint.shape(name) == shape[1:]


def test_experts_that_are_there_twice_are_refused(tmp_path: Path) -> None:
    tensors = {
        "l.experts.down_proj": torch.zeros(E, H, F),
        "l.experts.1.down_proj.weight": torch.zeros(H, F),
    }
    with pytest.raises(CheckpointError, match=r"either of which would be.*experts\.1\.down_proj"):
        UnstackedCheckpoint(saved(tmp_path, tensors))
