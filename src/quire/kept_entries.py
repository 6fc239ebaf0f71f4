"""Keeps what was measured in a small JSON file, under all that determines it.

    {"format": 9, "<field>": {"<key>": {"facts": {...}, ...}, ...}}

A key is a digest of an entry's facts: plain data by name. What can't be read is left out, and
measured anew. Called by `planning` for what steps take, and by `bench` for what number formats cost
in quality.
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

MAX_BYTES = 16 << 20
MOST_ENTRIES = 256
"""The oldest are forgotten."""
_KEY_BYTES = 16

logger = get_logger(__name__)


def key_of(facts: Mapping[str, Any]) -> str:
    """The name of an entry, by its facts."""
    text = json.dumps(facts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=_KEY_BYTES).hexdigest()


class KeptEntries:
    """The entries of one file. Two processes that write at once keep one of the two."""

    def __init__(self, path: Path, field: str, form: int, flag: str) -> None:
        """field: that holds the entries. form: what is called another format is not read. flag: of
        the command line, that names the file."""
        self._path = path.expanduser()
        self._field, self._form, self._flag = field, form, flag

    def read(self) -> dict[str, dict[str, Any]]:
        """All entries by key, the oldest first."""
        try:
            if self._path.stat().st_size > MAX_BYTES:
                raise ValueError
            found = json.loads(self._path.read_bytes())
            entries = found[self._field]
            if found["format"] != self._form or not isinstance(entries, dict):
                raise ValueError
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError):
            logger.warning(
                "%s can't be read as a file of kept %s, and is left out", self._path, self._field
            )
            return {}
        return {
            key: entry
            for key, entry in entries.items()
            if isinstance(entry, dict) and isinstance(entry.get("facts"), dict)
        }

    def find(self, facts: Mapping[str, Any]) -> dict[str, Any] | None:
        """The entry of the same facts; None: there is none."""
        return self.read().get(key_of(facts))

    def keep(self, facts: Mapping[str, Any], entry: Mapping[str, Any]) -> None:
        """In place of what was there before. Raises ConfigurationError where the file can't be
        written."""
        entries = self.read()
        entries.pop(key_of(facts), None)
        entries[key_of(facts)] = {"facts": dict(facts), **entry}
        for oldest in list(entries)[:-MOST_ENTRIES]:
            del entries[oldest]
        text = json.dumps({"format": self._form, self._field: entries}, indent=1) + "\n"
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(text)
            new.replace(self._path)
        except OSError as error:
            with suppress(OSError):
                new.unlink()
            raise ConfigurationError(
                f"what was measured can't be kept in {self._path} ({error.strerror}); name another"
                f" file with {self._flag}"
            ) from error

    def warn_of_damage(self) -> None:
        """Of an entry that does not say what it should."""
        logger.warning("an entry of %s is damaged, and is left out", self._path)
