"""The tower of Idefics 3 and SmolVLM: transformers' embeddings, and refused configs and tiles."""

import json
from pathlib import Path

import pytest
import torch
from tests.models.vision.idefics3_files import SIDE, TILE_TOKENS, make_tile, save_smolvlm
from transformers import PreTrainedModel

from quire.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from quire.formats.format_registry import load_weight_format
from quire.kernels.cpu.selection import select_kernels
from quire.layers.sharded import LinearMethods
from quire.models.registry import load_config
from quire.models.vision.idefics3 import position_buckets
from quire.models.vision.towers import TowerSource, find_tower
from quire.models.vision.vision_tower import VisionTower, finish

GRID = (1, 1, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp("smolvlm")
    return save_smolvlm(folder), folder


def find(folder: Path) -> TowerSource:
    found = find_tower(folder, load_config(folder))
    assert found is not None
    return found


def load(folder: Path, dtype: torch.dtype, kernels: str) -> VisionTower:
    chosen = select_kernels(kernels, 1, dtype, takes_fewer=False)
    method = load_weight_format(None).method(chosen, None)
    methods, device = LinearMethods(method, dense=method), torch.device("cpu")
    source = find(folder)
    num_bytes = source.weight_bytes(dtype, methods)
    assert num_bytes > 0
    return finish(source.load(dtype=dtype, device=device, methods=methods))


@torch.inference_mode()
@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("side", [SIDE, SIDE * 2 // 3])
def test_embeddings_equal_transformers(
    model: tuple[PreTrainedModel, Path], kernels: str, side: int
) -> None:
    reference, folder = model
    tower, tile = load(folder, torch.float32, kernels), make_tile(3, side)
    expected = reference.model.get_image_features(tile[None, None]).pooler_output[0]
    found = finish(tower.encode(tile, GRID))
    assert found.shape == expected.shape == (tower.num_tokens(tuple(tile.shape), GRID), 64)
    assert (found - expected).norm() < 1e-5 * expected.norm()


@torch.inference_mode()
def test_bits_do_not_depend_on_interruptions(model: tuple[PreTrainedModel, Path]) -> None:
    """Two tiles are encoded in turns by two towers of one folder."""
    towers = [load(model[1], torch.bfloat16, "auto") for _ in range(2)]
    tiles = [make_tile(seed) for seed in (1, 2)]
    expected = [finish(towers[0].encode(tile, GRID)) for tile in tiles]
    running = [tower.encode(tile, GRID) for tower, tile in zip(towers, tiles, strict=True)]
    found: dict[int, torch.Tensor] = {}
    while len(found) < 2:
        for index, slices in enumerate(running):
            try:
                next(slices)
            except StopIteration as end:
                found.setdefault(index, end.value)
    assert all(torch.equal(found[index], expected[index]) for index in range(2))
    assert not torch.equal(*expected)


def test_tile_sizes(model: tuple[PreTrainedModel, Path]) -> None:
    tower = load(model[1], torch.float32, "torch")
    assert tower.num_tokens((3, SIDE, SIDE), GRID) == tower.max_content_tokens == TILE_TOKENS
    for shape in [(3, SIDE, SIDE // 2), (1, SIDE, SIDE), (3, 8, 8), (3, 2 * SIDE, 2 * SIDE), (4,)]:
        with pytest.raises(InvalidRequestError):
            tower.num_tokens(shape, GRID)


def test_position_buckets_are_whole_without_rounding() -> None:
    assert position_buckets(32, 32).tolist() == list(range(32))
    assert position_buckets(2, 4).tolist() == [0, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"num_attention_heads": 7}, "num_attention_heads"),
        ({"patch_size": 64}, "patch_size"),
        ({"num_channels": 1}, "num_channels"),
        ({"num_hidden_layers": 3}, "lack"),
    ],
)
def test_refusals(
    model: tuple[PreTrainedModel, Path], tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    for path in model[1].iterdir():
        (tmp_path / path.name).symlink_to(path)
    raw = json.loads((model[1] / "config.json").read_text())
    raw["vision_config"] |= changes
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        loading = find(tmp_path).load(
            dtype=torch.float32,
            device=torch.device("cpu"),
            methods=LinearMethods(load_weight_format(None).method(None, None)),
        )
        finish(loading)
