"""Finds the files that hold a model's weights: one file, or those in an index.

Works on names, so it serves for the hub's file lists, before anything is fetched, and for folders.
Called by `repository`, `fetching` and the reader of checkpoints. Imports no torch.
"""

from collections.abc import Collection
from fnmatch import fnmatch
from pathlib import Path

from quire.errors import CheckpointError, shown
from quire.hub.model_files import read_json_object, shown_name

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth")
_MAX_NAME_BYTES = 255
"""The longest file name that common file systems allow."""
_MAX_NAMES_SHOWN = 3


def has_weights(names: Collection[str]) -> bool:
    """Whether a model whose files have these names has weights in Hugging Face's format."""
    return SINGLE_FILE in names or INDEX_FILE in names


def weights_file(what: str, names: Collection[str]) -> str:
    """SINGLE_FILE if it is among the model's files `names`, else INDEX_FILE.

    `what` is the folder or hub id for messages. Raises CheckpointError if the model has neither.
    """
    for name in (SINGLE_FILE, INDEX_FILE):
        if name in names:
            return name
    pickles = sorted(
        name for name in names if any(fnmatch(name, pattern) for pattern in _PICKLE_PATTERNS)
    )
    if pickles:
        raise CheckpointError(
            f"{what} has its weights only as pickles ({', '.join(pickles[:_MAX_NAMES_SHOWN])}), "
            "which can run any code when they are read, so quire never does. Convert them once: "
            "load the model in transformers and call "
            "model.save_pretrained(FOLDER, safe_serialization=True)"
        )
    if any(name.endswith(".gguf") for name in names):
        raise CheckpointError(
            f"{what} has weights in GGUF format only, and none of these files is the first one of a"
            " model; name another model"
        )
    others = sorted(name for name in names if name.endswith(".safetensors"))
    if others:
        raise CheckpointError(
            f"{what} has neither {SINGLE_FILE} nor {INDEX_FILE}, but"
            f" {', '.join(map(shown_name, others[:_MAX_NAMES_SHOWN]))}; if one file is the whole"
            f" model in Hugging Face's names, call it {SINGLE_FILE}; else fetch the index"
        )
    raise CheckpointError(
        f"{what} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there; the download is"
        " not whole, or the model was published in another format only"
    )


def shard_names(index: Path) -> list[str]:
    """The sorted names of the files that an index lists. Raises CheckpointError."""
    return sorted(set(read_weight_map(index).values()))


def read_weight_map(index: Path) -> dict[str, str]:
    """Maps each tensor's name to the name of its file, from an index. Raises CheckpointError if the
    index is invalid."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map from tensors to files; fetch it again")
    for name in weight_map.values():
        if not _is_file_name(name):
            raise CheckpointError(
                f"{index} names the file {shown(name)}, which is not in its folder"
            )
    return weight_map


def check_shards(what: str, shards: Collection[str], names: Collection[str]) -> None:
    """Raises CheckpointError that lists the shards which are not among `names`."""
    missing = sorted(set(shards) - set(names))
    if not missing:
        return
    listed = ", ".join(map(shown_name, missing[:_MAX_NAMES_SHOWN]))
    rest = len(missing) - _MAX_NAMES_SHOWN
    raise CheckpointError(
        f"{what}: {INDEX_FILE} names {len(shards)} files, of which {listed}"
        f"{f' and {rest} more' if rest > 0 else ''} {'do' if len(missing) > 1 else 'does'} not"
        " exist; the download is not whole: fetch it again"
    )


def weight_paths(folder: Path) -> list[Path]:
    """The files of a folder's weights. Raises CheckpointError if one of them is missing."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; name one in Hugging Face's format")
    names = {path.name for path in folder.iterdir()}
    file = weights_file(str(folder), names)
    if file == SINGLE_FILE:
        return [folder / file]
    shards = shard_names(folder / file)
    check_shards(str(folder), shards, names)
    return [folder / name for name in shards]


def _is_file_name(name: object) -> bool:
    """Whether a folder may hold a file of this name."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and len(name.encode()) <= _MAX_NAME_BYTES
        and Path(name).name == name
    )
