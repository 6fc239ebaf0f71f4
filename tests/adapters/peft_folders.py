"""Random adapters in folders as PEFT saves them, and the models that they were merged into.

PEFT itself is not needed: a folder is a small config and a safetensors file.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

Pairs = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""Paths of linears -> A [r, I] and B [O, r]."""

_IN_LAYER = re.compile(r"(^|\.)(layers?|h)\.\d+\.")
_REFUSED = re.compile(r"experts\.\d+|conv1d|shared_head")


def sizes_of(model: PreTrainedModel, pattern: str = "") -> dict[str, tuple[int, int]]:
    """Paths of the linears in the model's layers that may have adapters -> inputs and outputs."""
    found = {}
    for path, module in model.named_modules():
        if not _IN_LAYER.search(path) or _REFUSED.search(path) or not re.search(pattern, path):
            continue
        if isinstance(module, Conv1D):
            found[path] = (module.nx, module.nf)
        elif type(module) is nn.Linear:
            found[path] = (module.in_features, module.out_features)
    return found


def random_pairs(
    sizes: Mapping[str, tuple[int, int]],
    rank: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Adapters that change the results clearly, and not beyond all bounds."""
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for path, (inputs, outputs) in sizes.items():
        a = torch.randn(rank, inputs, generator=generator) * 0.1
        b = torch.randn(outputs, rank, generator=generator) * 0.1
        pairs[path] = (a.to(dtype), b.to(dtype))
    return pairs


def save_peft(folder: Path, pairs: Pairs, **fields: Any) -> Path:
    """A folder with these tensors. fields: of the config, beside or in place of the usual ones."""
    rank = len(next(iter(pairs.values()))[0]) if pairs else 8
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({path.rpartition(".")[2] for path in pairs}),
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {},
    }
    tensors = {}
    for path, (a, b) in pairs.items():
        tensors[f"base_model.model.{path}.lora_A.weight"] = a.contiguous()
        tensors[f"base_model.model.{path}.lora_B.weight"] = b.contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@torch.no_grad()
def merge(model: PreTrainedModel, pairs: Pairs, scaling: float) -> None:
    """Adds the adapter to the model's own weights."""
    for path, (a, b) in pairs.items():
        module = model.get_submodule(path)
        delta = scaling * (b.float() @ a.float())
        assert isinstance(module.weight, torch.Tensor)
        module.weight += (delta.T if isinstance(module, Conv1D) else delta).to(module.weight.dtype)
