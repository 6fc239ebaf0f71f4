"""Folders of models that draft for the embedded model."""

import json
import shutil
from pathlib import Path

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
