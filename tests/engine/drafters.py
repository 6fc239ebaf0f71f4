"""Folders of models that draft for the embedded model."""

import json
import random
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from quire.hub.model_folder import resolve_model_folder

NUM_LAYERS = 3


def save_drafter(folder: Path, num_layers: int = NUM_LAYERS) -> Path:
    """The embedded model cut behind its first layers: it often agrees with the whole one."""
    whole = resolve_model_folder(None)
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(whole / name, folder / name)
    config = json.loads((whole / "config.json").read_text())
    config |= {"num_hidden_layers": num_layers, "max_window_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(whole / "model.safetensors")
    kept = {
        name: tensor
        for name, tensor in weights.items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < num_layers
    }
    save_file(kept, folder / "model.safetensors")
    return folder


def save_reordered_drafter(folder: Path, num_dropped: int = 600) -> Path:
    """The same with other token ids, and without the last tokens of the vocabulary."""
    save_drafter(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    kept = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    kept = kept[: len(kept) - num_dropped]
    old_ids = {token: model["vocab"][token] for token in kept}
    random.Random(4).shuffle(kept)
    model["vocab"] = {token: token_id for token_id, token in enumerate(kept)}
    model["merges"] = [
        pair for pair in model["merges"] if {*pair, "".join(pair)} <= model["vocab"].keys()
    ]
    for each in added:
        each["id"] = model["vocab"][each["content"]]
    added.sort(key=lambda each: each["id"])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "config.json").read_text())
    config |= {"vocab_size": len(kept), "eos_token_id": None, "pad_token_id": None}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    order = torch.tensor([old_ids[token] for token in kept])
    weights["model.embed_tokens.weight"] = table[order].contiguous()
    save_file(weights, folder / "model.safetensors")
    return folder
