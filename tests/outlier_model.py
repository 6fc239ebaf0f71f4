"""The embedded model with outliers: the same function, in numbers that formats can't bear.

Outlier keys: of the norms of q and k, a few elements of k are multiplied by a power of two and
those of q divided by it. Elements i and i + D/2, which the rotation mixes, have the same factor, so
every product q·k keeps its bits.

Outlier activations: some channels of the norms before linears are multiplied by a power of two, and
the weights that read them divided by it. So are channels within the MLPs: rows of `up` are
multiplied, and columns of `down` divided.

In the model's own dtype the answers are those of the embedded model.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from quire.hub.model_folder import resolve_model_folder

HEAD_DIM = 64
PAIRS = (3, 10)
FEW = [5, 83, 140, 222]
"""Channels that are made massive."""


READERS = {
    "input_layernorm": ("q_proj", "k_proj", "v_proj"),
    "post_attention_layernorm": ("gate_proj", "up_proj"),
}
"""Norms of the residual stream -> the linears that read them."""


def make_outlier_model(folder: Path, factor: int) -> Path:
    """With outlier keys: write the checkpoint into `folder`, which is made. factor: of the
    outliers; a power of 2."""
    places = [place for pair in PAIRS for place in (pair, pair + HEAD_DIM // 2)]

    def change(name: str, weight: torch.Tensor) -> None:
        if name.endswith("k_norm.weight"):
            weight[places] *= factor
        elif name.endswith("q_norm.weight"):
            weight[places] /= factor

    return _make(folder, change)


def make_outlier_activations(folder: Path, factor: int, step: int) -> Path:
    """With outlier activations: write the checkpoint into `folder`, which is made. factor: of the
    outliers; a power of 2. step: one channel of so many is an outlier."""

    def change(name: str, weight: torch.Tensor) -> None:
        for norm, readers in READERS.items():
            if name.endswith(f"{norm}.weight"):
                weight[::step] *= factor
            elif any(name.endswith(f"{reader}.weight") for reader in readers):
                weight[:, ::step] /= factor

    return _make(folder, change)


def make_massive_channels(folder: Path, factor: int) -> Path:
    """With outlier activations, few and large: four inputs of each norm's readers, and four within
    each MLP. Write the checkpoint into `folder`, which is made. factor: of the outliers; a power of
    2."""

    def change(name: str, weight: torch.Tensor) -> None:
        for norm, readers in (*READERS.items(), ("up_proj", ("down_proj",))):
            if name.endswith(f"{norm}.weight"):
                weight[FEW] *= factor
            elif any(name.endswith(f"{reader}.weight") for reader in readers):
                weight[:, FEW] /= factor

    return _make(folder, change)


def _make(folder: Path, change: Callable[[str, torch.Tensor], None]) -> Path:
    shutil.copytree(resolve_model_folder(None, None), folder)
    path = folder / "model.safetensors"
    path.chmod(0o644)
    weights = load_file(path)
    for name, weight in weights.items():
        change(name, weight)
    save_file(weights, path, metadata={"format": "pt"})
    return folder
