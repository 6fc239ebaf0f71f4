"""The embedded model with outlier keys: the same function, in keys that compact formats can't bear.

Of the norms of q and k, a few elements of k are multiplied by a power of two and those of q divided
by it. Elements i and i + D/2, which the rotation mixes, have the same factor, so every product q·k
keeps its bits: in the model's own dtype the answers are those of the embedded model.
"""

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from quire.hub.model_folder import resolve_model_folder

HEAD_DIM = 64
PAIRS = (3, 10)


def make_outlier_model(folder: Path, factor: int) -> Path:
    """Write the checkpoint into `folder`, which is made. factor: of the outliers; a power of 2."""
    source = resolve_model_folder(None, None)
    shutil.copytree(source, folder)
    path = folder / "model.safetensors"
    path.chmod(0o644)
    weights = load_file(path)
    places = [place for pair in PAIRS for place in (pair, pair + HEAD_DIM // 2)]
    for name, weight in weights.items():
        if name.endswith("k_norm.weight"):
            weight[places] *= factor
        elif name.endswith("q_norm.weight"):
            weight[places] /= factor
    save_file(weights, path, metadata={"format": "pt"})
    return folder
