"""Towers with the random weights of a model of transformers."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from quire.formats.format_registry import load_weight_format
from quire.kernels.cpu.selection import select_kernels
from quire.layers.sharded import LinearMethods
from quire.models.registry import load_config
from quire.models.vision.slices import use_kernels
from quire.models.vision.towers import TowerSource, find_tower
from quire.models.vision.vision_tower import Grid, VisionTower, finish


def randomize(model: PreTrainedModel) -> PreTrainedModel:
    """Give all weights, biases and norms values that differ from those of an initialiser."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.15)
            if "norm" in name and name.endswith("weight"):
                parameter += 1
    return model.eval()


def save_model(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Write a model to the folder, and return it."""
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    return model


def raw_config(model: PreTrainedModel) -> dict[str, Any]:
    """The contents of the config.json that the model would be saved with."""
    model.config.architectures = [type(model).__name__]
    raw: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    return raw


def load(
    model: PreTrainedModel,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    kernels: str = "auto",
) -> VisionTower:
    """The tower of a model of transformers, which is saved in the folder and read from it."""
    model.save_pretrained(folder)
    source = find_tower(folder, load_config(folder))
    assert source is not None
    return load_found(source, model, dtype, kernels)


def load_found(
    source: TowerSource,
    model: PreTrainedModel,
    dtype: torch.dtype = torch.float32,
    kernels: str = "auto",
) -> VisionTower:
    """The tower of a source, with the embedding of a model of transformers."""
    chosen = select_kernels(kernels, 1, dtype, takes_fewer=False)
    method = load_weight_format(None).method(chosen, None)
    methods = LinearMethods(method, dense=method)
    tower = finish(source.load(dtype=dtype, device=torch.device("cpu"), methods=methods))
    use_kernels(tower, chosen)
    table = model.get_input_embeddings().weight.detach().to(dtype)
    tower.use_embedding(lambda token_ids: table[token_ids])
    return tower


@torch.inference_mode()
def encoded(tower: VisionTower, values: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The whole result, computed without a pause."""
    found = finish(tower.encode(values, grid))
    assert len(found) == tower.num_tokens(tuple(values.shape), grid) <= tower.max_content_tokens
    return found


def encoded_with_pauses(tower: VisionTower, values: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The whole result, with other work of torch between any two slices."""
    slices = tower.encode(values, grid)
    while True:
        with torch.inference_mode():
            try:
                next(slices)
            except StopIteration as end:
                return end.value
        torch.randn(33, 17) @ torch.randn(17, 5)


def num_slices(tower: VisionTower, values: torch.Tensor, grid: Grid) -> int:
    """The number of pauses, up to 10,000."""
    with torch.inference_mode():
        return sum(1 for _ in islice(tower.encode(values, grid), 10_000))


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Both are equal to 1e-4 of the largest value."""
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
