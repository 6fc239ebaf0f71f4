"""Reads names of Ollama's library, such as `qwen3:0.6b`, as hub ids.

The table is the file aliases.toml. It must be updated when Ollama's library changes. Called by
`model_folder`, and by `failures` for the nearest name.
"""

import tomllib
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

from quire.errors import CheckpointError, shown

TABLE = Path(__file__).with_suffix(".toml")
LATEST = "latest"


def hub_id_of(name: str) -> str | None:
    """The hub id of a name in the table; None for other names.

    `name` may have a tag after a colon. Raises CheckpointError if the name is in the table, but the
    tag is no size of it. Tags that also name a quantization, such as 8b-q4_K_M, are refused, since
    the hub id has the whole weights.
    """
    if "/" in name.removeprefix("library/"):
        return None
    stem, _, tag = name.removeprefix("library/").lower().partition(":")
    family = _families().get(stem)
    if family is None:
        return None
    sizes = family.get("sizes", ())
    if tag not in ("", LATEST, *sizes):
        known = " or ".join(f"{stem}:{size}" for size in sizes) or stem
        raise CheckpointError(
            f"there is no model {shown(name)}; give {known}. --quantization says how weights are"
            " kept"
        )
    if not sizes:
        return _sized(family, "")
    return _sized(family, sizes[0] if tag in ("", LATEST) else tag)


def alias_of(hub_id: str) -> str | None:
    """The name in the table of a hub id, without a tag if it is the first size; None if the table
    lacks the id."""
    for stem, family in _families().items():
        for at, size in enumerate(family.get("sizes", ("",))):
            if _sized(family, size) == hub_id:
                return f"{stem}:{size}" if at else stem
    return None


def family_names() -> Collection[str]:
    """The names in the table, without tags."""
    return _families().keys()


def _sized(family: dict[str, Any], size: str) -> str:
    """The hub id of a size of a family."""
    hub_id: str = family["hub_id"]
    return hub_id.format(size.upper() if family.get("upper", True) else size)


@cache
def _families() -> dict[str, dict[str, Any]]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))
