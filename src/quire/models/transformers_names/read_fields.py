"""Looks up which fields of a config.json any class of transformers may read.

`read_fields.txt` holds a version of transformers, and the names of all fields that its code may
read. `tools/config_fields.py` writes it. Called by `models.config_fields` for fields that quire
does not read.
"""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

LIST = Path(__file__).parent / "read_fields.txt"
_RELEASE = re.compile(r"(\d{1,4})\.(\d{1,4})")


@cache
def _version_and_names() -> tuple[str, frozenset[str]]:
    version, *names = LIST.read_text(encoding="utf-8").split()
    return version, frozenset(names)


def known_version() -> str:
    """The version of transformers whose field names are listed."""
    return _version_and_names()[0]


def why_it_may_be_read(name: str, raw: Mapping[str, Any]) -> str | None:
    """A clause that says why a field may change results; None if no class reads it.

    `raw` is the whole config. Fields whose names begin with an underscore don't affect models.
    """
    version, names = _version_and_names()
    if name.startswith("_"):
        return None
    if name in names:
        return "some class of transformers reads a field of this name"
    if "auto_map" in raw:
        return "code in the model's own folder (auto_map) may read it"
    release, known = _release(raw.get("transformers_version")), _release(version)
    if release is None or known is None or release <= known:
        return None
    return (
        f"the config was written by transformers {raw['transformers_version']}, but quire knows"
        f" only which fields transformers {version} reads"
    )


def _release(version: object) -> tuple[int, int] | None:
    found = _RELEASE.match(version) if isinstance(version, str) else None
    return None if found is None else (int(found[1]), int(found[2]))
