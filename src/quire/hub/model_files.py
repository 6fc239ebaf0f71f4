"""Reads a model folder's small JSON files; every error message names the file.

If another file was downloaded in place of the JSON (a git-LFS pointer, a web page), the message
says so. Called by the readers of configs, tokenizers and checkpoints. Imports no torch.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from quire.errors import CheckpointError, shown

MAX_JSON_BYTES = 32 << 20
"""Maximum number of bytes of one file. The largest known index of weights has 8 MB, for 384 experts
in 61 layers."""

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""The first bytes of the text that git-LFS leaves in place of a file that it has not fetched."""

_WEB_PAGE = b"<!doctype html"
_GGUF_MAGIC = b"GGUF"
_MAX_NAME_CHARACTERS = 120
_MAX_TEXT_CHARACTERS = 300


def shown_name(name: str) -> str:
    """A name from a file, for a message: quoted and cut if it is long or has odd characters."""
    return name if name.isprintable() and len(name) <= _MAX_NAME_CHARACTERS else shown(name)


def shown_text(error: object) -> str:
    """A library's error message as one line of at most _MAX_TEXT_CHARACTERS characters."""
    text = " ".join(str(error).split())
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= _MAX_TEXT_CHARACTERS else text[:_MAX_TEXT_CHARACTERS] + "..."


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object that the file `path` holds. Raises CheckpointError if it holds none."""
    if not path.parent.is_dir():
        raise CheckpointError(f"{path.parent} is not a folder; name one in Hugging Face's format")
    try:
        content = _read(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent} has no {path.name}; name a model folder in Hugging Face's format"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
    return parse_json_object(content, str(path))


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """The JSON list of objects in the file `path`. Raises CheckpointError if the file has none."""
    try:
        content = _read(path)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
    listed = parse_json_object(b'{"": %s}' % content, str(path))[""]
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise CheckpointError(f"{path} holds no list of objects; fetch it again")
    return listed


def parse_json_object(content: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `content`. `what` names its source in messages.

    Raises CheckpointError for any other content, and if a name occurs twice in an object.
    """
    try:
        # Python's parser refuses integers of more than 4,300 digits. "utf-8-sig" skips the
        # byte-order mark that Windows editors write, which JSON does not allow.
        found = json.loads(content.decode("utf-8-sig"), object_pairs_hook=_without_repeats)
    except RecursionError:
        raise CheckpointError(f"{what} nests too deeply to be read; fetch it again") from None
    except ValueError as error:  # neither UTF-8 nor JSON
        other = foreign_content(content)
        reason = f"is {other}" if other else f"is not JSON: {shown_text(error)}; fetch it again"
        raise CheckpointError(f"{what} {reason}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{what} holds {shown(found)}, but must hold a JSON object")
    return found


def foreign_content(start: bytes) -> str | None:
    """Text for a message: a known kind of content that a file holds by mistake, and what to do
    about it. None if the kind is unknown.

    `start` holds the first bytes of the file.
    """
    if start.startswith(LFS_POINTER):
        return (
            "a pointer of git-LFS, not the file itself; run `git lfs pull` in the clone that it "
            "comes from, or download the model anew (`hf download ID`, or give its hub id)"
        )
    if start.lstrip()[: len(_WEB_PAGE)].lower() == _WEB_PAGE:
        return "a web page, not the file itself; download it anew (`hf download ID`)"
    if start.startswith(_GGUF_MAGIC):
        return "a model in GGUF format under another file's name; name that file as the model"
    return None


def is_gguf(path: Path) -> bool:
    """Whether a file is in GGUF format, by its first bytes, or by its name if it can't be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC
    except OSError:
        return path.suffix.lower() == ".gguf"


def _read(path: Path) -> bytes:
    if path.exists() and not path.is_file():
        # Opening a pipe or a device may wait for ever.
        raise CheckpointError(f"{path} can't be read: it is not a file; fetch it again")
    with path.open("rb") as file:
        content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{path} has more than {MAX_JSON_BYTES} bytes, too many for such a file; fetch it again"
        )
    return content


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = counts.most_common(1)[0][0]
        raise ValueError(f"the name {shown_name(twice)} occurs twice in one object")
    return found
