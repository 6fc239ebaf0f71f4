"""Keeps what was measured, for later plans on the same machine.

    ~/.cache/quire/step_costs.json      {"format": 8, "costs": {"<key>": {...}, ...}}

An entry is found only under what determines how long steps take: the structure of the model's
files, number formats, block size, kernels, threads, device and machine, the options that change how
steps are computed, and quire's version. What can't be read is measured anew.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from quire.errors import ConfigurationError
from quire.observability.log import get_logger
from quire.planning.step_costs import StepCosts

FORMAT = 9
MAX_BYTES = 16 << 20
MOST_ENTRIES = 256
"""The oldest are forgotten."""
_HEADER_BYTES = 1 << 20
_KEY_BYTES = 16

logger = get_logger(__name__)


def folder_digest(folder: Path) -> str:
    """Of the structure of a model's files: their names and sizes, the config, and the headers of
    the weights, which say each tensor's shape and type. folder: or a file that is a model."""
    digest = hashlib.blake2b(digest_size=_KEY_BYTES)
    files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    for path in files:
        is_weights = path.suffix in (".safetensors", ".gguf", ".bin")
        if not path.is_file() or not (is_weights or path.name == "config.json"):
            continue
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HEADER_BYTES))
    return digest.hexdigest()


def key_of(facts: Mapping[str, Any]) -> str:
    """The name of an entry, by all that determines it: plain data by name."""
    text = json.dumps(facts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=_KEY_BYTES).hexdigest()


class KeptCosts:
    """The entries of one file. Two processes that write at once keep one of the two."""

    def __init__(self, path: Path) -> None:
        self._path = path.expanduser()

    def find(self, facts: Mapping[str, Any]) -> StepCosts | None:
        """What was measured under the same facts; None: nothing."""
        entry = self._read().get(key_of(facts))
        if entry is None:
            return None
        try:
            return StepCosts.from_mapping(entry["costs"])
        except (KeyError, TypeError, ValueError, AssertionError):
            logger.warning("an entry of %s is damaged, and is left out", self._path)
            return None

    def keep(self, facts: Mapping[str, Any], costs: StepCosts) -> None:
        """In place of what was there before. Raises ConfigurationError where the file can't be
        written."""
        entries = self._read()
        entries.pop(key_of(facts), None)
        entries[key_of(facts)] = {"facts": dict(facts), "costs": costs.as_mapping()}
        for oldest in list(entries)[:-MOST_ENTRIES]:
            del entries[oldest]
        text = json.dumps({"format": FORMAT, "costs": entries}, indent=1)
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(text)
            new.replace(self._path)
        except OSError as error:
            with suppress(OSError):
                new.unlink()
            raise ConfigurationError(
                f"what steps take can't be kept in {self._path} ({error.strerror}); name another"
                " file with --costs"
            ) from error

    def _read(self) -> dict[str, Any]:
        try:
            if self._path.stat().st_size > MAX_BYTES:
                raise ValueError
            found = json.loads(self._path.read_bytes())
            if found["format"] != FORMAT or not isinstance(found["costs"], dict):
                raise ValueError
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError):
            logger.warning("%s is not a file of step costs, so all is measured anew", self._path)
            return {}
        entries: dict[str, Any] = found["costs"]
        return entries
