"""Random drafters for `law`: small models, EAGLE-3 heads and MTP heads.

A model drafts that is the served one, nearly so, or another one. Heads are random, and rarely
right, so `law` lets a liar choose most of their drafts.
"""

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.engine.drafters import save_drafter, save_reordered_drafter
from tests.models.heads.head_files import add_layer_head, add_named_head, save_eagle3

from benchmarks.speculation.law_models import VOCAB_SIZE, WITH_STATES, Served, saved
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.models.registry import load_config

DRAFTER_RATE = 0.6
"""The share of models that have a drafter."""

WITH_LAYER_HEADS = ("deepseek_v3", "glm4-moe", "glm4_moe_lite")
"""Families whose MTP head is a further layer of the decoder."""

WITH_NAMED_HEADS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
"""Families whose MTP head has a name of its own."""

WITHOUT_INPUTS = ("gemma4", "gemma4-moe")
"""Families that give no inputs of layers for EAGLE-3."""

NOISE = 0.004
"""The standard deviation by which the weights of a nearly equal model differ."""

SMALL_VOCABULARY = 900
"""The number of tokens that some EAGLE-3 heads know."""


def with_drafter(rng: random.Random, served: Served, folder: Path) -> Served:
    """The served model with a random drafter, or without one; files are written into `folder`."""
    if rng.random() >= DRAFTER_RATE:
        return served
    methods = ["draft_model"]
    if "tensor_parallel_size" not in served.options and served.name not in WITHOUT_INPUTS:
        methods.append("eagle3")
    if served.name in WITH_LAYER_HEADS + WITH_NAMED_HEADS:
        methods += ["mtp", "mtp"]
    method = rng.choice(methods)
    drafter: dict[str, Any] = {"speculation": method}
    if method == "mtp":
        return replace(served, folder=_with_head(served.name, folder), drafter=drafter)
    choose = _draw_head if method == "eagle3" else _draw_model
    return replace(
        served, drafter=drafter | {"speculative_model": str(choose(rng, served, folder))}
    )


def _draw_model(rng: random.Random, served: Served, folder: Path) -> Path:
    """The folder of a model that drafts: it often agrees, or never."""
    if served.folder is None:
        name, save = rng.choice((("cut", save_drafter), ("reordered", save_reordered_drafter)))
        path = folder / f"embedded, {name}"
        return path if path.exists() else save(path)
    kind = rng.choice(("the same", "nearly the same", "nearly the same", "another"))
    if served.name in WITH_STATES or kind == "another":
        return saved("llama", folder / "llama")
    return served.folder if kind == "the same" else _near(served.folder)


def _near(folder: Path) -> Path:
    """A copy of a model whose weights differ a little; it is made once."""
    path = folder.with_name(f"{folder.name}, nearly")
    if not path.exists():
        shutil.copytree(folder, path)
        generator = torch.Generator().manual_seed(1)
        tensors = load_file(path / "model.safetensors")
        for tensor in tensors.values():
            tensor += NOISE * torch.randn(tensor.shape, generator=generator)
        save_file(tensors, path / "model.safetensors")
    return path


def _draw_head(rng: random.Random, served: Served, folder: Path) -> Path:
    """The folder of an EAGLE-3 head that reads the inputs of the first three layers."""
    size = rng.choice((None, SMALL_VOCABULARY))
    path = folder / f"{served.name}, eagle3, {size}"
    if not path.exists():
        save_eagle3(
            path,
            size=load_config(served.folder or EMBEDDED_MODEL).hidden_size,
            vocab_size=VOCAB_SIZE,
            draft_vocab_size=size,
            eagle_aux_hidden_state_layer_ids=[0, 1, 2],
        )
    return path


def _with_head(name: str, folder: Path) -> Path:
    """The folder of a model with an MTP head in its files; it is written once."""
    path = folder / f"{name}, mtp"
    if path.exists():
        return path
    if name in WITH_LAYER_HEADS:
        kinds = ["dense", "sparse", "sparse"]  # the head has experts
        changes = {"mlp_layer_types": kinds} if name == "glm4_moe_lite" else {}
        add_layer_head(saved(name, path, **changes))
    else:
        kinds = ["linear_attention", "full_attention"] * 2
        add_named_head(saved(name, path, layer_types=kinds, num_hidden_layers=len(kinds)))
    return path
