"""Groups GGUF file names into models, and finds the model at a path.

    tiny-Q4_K_M.gguf                     a model in one file
    big-Q8_0-00001-of-00003.gguf, ...    a model in three files; the first one has the metadata
    mmproj-F16.gguf, imatrix.gguf        no model: an image encoder, a quantizer's statistics

Grouping needs only names, so it also works on the hub's file lists. Imports no torch. Called by the
fetching of models and by the readers of weights, configs and tokenizers.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath
from typing import TypeVar

from quire.errors import CheckpointError
from quire.hub.model_files import is_gguf, shown_name

AnyPath = TypeVar("AnyPath", Path, PurePosixPath)

SUFFIX = ".gguf"
_MAX_FILES = 9999
_MAX_NAMES_SHOWN = 12
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_ENCODER, _NOTES = "mmproj", "imatrix"
"""Words in the names of files that hold an image encoder or a quantizer's statistics, not a model.
A model that was quantized with an importance matrix may also have `imatrix` in its name; then the
name contains a quantization as well."""
_LABEL = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d|TQ\d|MXFP4|NVFP4|BF16|FP?16|FP?32)[A-Z0-9_]*?)"
    r"(?:[-._]i?mat(?:rix)?)?(?:-\d{5}-of-\d{5})?\.gguf$",
    re.IGNORECASE,
)
_QUANTIZED = re.compile(r"(?:UD-)?(?:I?Q|TQ)\d")


def models_of(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Maps the name of each model's first file to the sorted names of all its files. Leaves out
    models whose first file is missing. `names` may include folders."""
    parts: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        if _is_gguf_name(name) and not _is_no_model(name):
            parts[first_name(name)].append(name)
    return {first: tuple(files) for first, files in parts.items() if first in files}


def first_name(name: str) -> str:
    """The name of the model's first file, which has the metadata. `name` is any of its files."""
    found = _SPLIT.fullmatch(name)
    if found is None:
        return name
    return f"{found['stem']}-00001-of-{found['count']}{name[-len(SUFFIX) :]}"


def all_names(first: str) -> tuple[str, ...]:
    """The names of all files of a model, from the name of its first file."""
    found = _SPLIT.fullmatch(first)
    if found is None or first_name(first) != first:
        return (first,)
    # A name may claim any number of files, so the number is bounded.
    count = min(int(found["count"]), _MAX_FILES)
    suffix = f"-of-{found['count']}{first[-len(SUFFIX) :]}"
    return tuple(f"{found['stem']}-{number:05}{suffix}" for number in range(1, count + 1))


def model_stem(name: str) -> str:
    """The name of a file's model, which is the file name without suffix and part number."""
    found = _SPLIT.fullmatch(name)
    return found["stem"] if found else name[: -len(SUFFIX)] if _is_gguf_name(name) else name


def quant_label(name: str) -> str | None:
    """The quantization in a file's name, such as Q4_K_M, in upper case; None if it has none."""
    found = _LABEL.search(name)
    return found[1].upper() if found else None


def find_gguf(path: Path) -> Path | None:
    """The first file of the GGUF model at `path`, which is a file or a folder with one model; None
    if there is no model. Raises CheckpointError if there are several, or if `path` is a later file
    of a model."""
    if path.is_file():
        if not is_gguf(path):
            return None
        if first_name(path.name) != path.name:
            raise CheckpointError(
                f"{path} is a later part of a model in several files; name the first one, "
                f"{first_name(path.name)}"
            )
        return path
    if not path.is_dir():
        return None
    found = models_of(each.name for each in path.iterdir())
    if len(found) > 1:
        raise CheckpointError(
            f"{path} has several models in GGUF format, {_listed(found)}; name the file that is to "
            "be served"
        )
    return path / next(iter(found)) if found else None


def gguf_paths(path: Path) -> list[Path]:
    """All files of the model that `find_gguf` finds. Raises CheckpointError if there is no model or
    a file of it is missing."""
    first = find_gguf(path)
    if first is None:
        raise CheckpointError(
            f"{path} is not a model in GGUF format and contains none; name a .gguf file"
        )
    paths = [first.with_name(name) for name in all_names(first.name)]
    missing = [each.name for each in paths if not each.exists()]
    if missing:
        raise CheckpointError(
            f"{first} is the first of {len(paths)} files, of which {_listed(missing)} "
            f"{'do' if len(missing) > 1 else 'does'} not exist; the download is not whole: fetch "
            "it again"
        )
    return paths


def is_encoder_name(name: str) -> bool:
    """Whether a file's name is that of a GGUF file with an encoder of images."""
    return _is_gguf_name(name) and _ENCODER in _words(name)


def encoder_folders(model: AnyPath) -> tuple[AnyPath, ...]:
    """The folders in which a model's encoder of images may be, the nearest first. Repositories with
    a folder for each quantization have the encoder above these folders."""
    nearest = model.parent
    return (nearest,) if nearest == nearest.parent else (nearest, nearest.parent)


def _is_gguf_name(name: str) -> bool:
    return name.lower().endswith(SUFFIX)


def _is_no_model(name: str) -> bool:
    words = _words(name)
    is_quantized = _QUANTIZED.match(quant_label(name) or "") and not name.lower().startswith(_NOTES)
    return _ENCODER in words or (_NOTES in words and not is_quantized)


def _words(name: str) -> list[str]:
    return re.split(r"[-._/]", name.lower())


def _listed(names: Collection[str]) -> str:
    shown = [shown_name(name) for name in sorted(names)[:_MAX_NAMES_SHOWN]]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")
