"""Stores measurements in a small JSON file, keyed by the conditions ("facts") they depend on.

    {"format": 9, "<field>": {"<key>": {"facts": {...}, ...}, ...}}

An entry's facts are the named conditions of its measurement (model, device, version), as plain
data; its key is their digest. Unreadable entries are ignored, so they are measured again. Used by
`planning` for step times, and by `bench` for the quality cost of number formats.
"""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from quire.errors import ConfigurationError
from quire.observability.log import get_logger

MAX_BYTES = 16 << 20
MOST_ENTRIES = 256
"""Maximum number of entries in a file. If there are more, the oldest are dropped."""
_KEY_BYTES = 16

logger = get_logger(__name__)


def key_of(facts: Mapping[str, Any]) -> str:
    """The key of an entry: a digest of its facts."""
    text = json.dumps(facts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=_KEY_BYTES).hexdigest()


class MeasurementFile:
    """The entries of one file. If two processes write at the same time, one entry may be lost."""

    def __init__(self, path: Path, field: str, form: int, flag: str) -> None:
        """`field` is the JSON field with the entries. `form` is the number of the file's format;
        files with other numbers are not read. `flag` is the command-line flag that names the
        file."""
        self._path = path.expanduser()
        self._field, self._form, self._flag = field, form, flag

    def read(self) -> dict[str, dict[str, Any]]:
        """All entries by key, the oldest first. An unreadable file counts as empty."""
        try:
            status = self._path.stat()
            # Devices and pipes may have no end.
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                raise ValueError
            found = json.loads(self._path.read_bytes())
            entries = found[self._field]
            if found["format"] != self._form or not isinstance(entries, dict):
                raise ValueError
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            logger.warning(
                "%s can't be read as a file of stored %s, and is ignored", self._path, self._field
            )
            return {}
        return {
            key: entry
            for key, entry in entries.items()
            if isinstance(entry, dict) and isinstance(entry.get("facts"), dict)
        }

    def find(self, facts: Mapping[str, Any]) -> dict[str, Any] | None:
        """The entry with the same facts, or None."""
        return self.read().get(key_of(facts))

    def store(self, facts: Mapping[str, Any], entry: Mapping[str, Any]) -> None:
        """Store an entry, replacing the one with the same facts.

        Raises ConfigurationError if the file can't be written, or is no regular file.
        """
        # No program could use a device such as /dev/null after a file has replaced it.
        if self._path.exists() and not self._path.is_file():
            raise self._unusable("it is not a regular file")
        entries = self.read()
        entries.pop(key_of(facts), None)
        entries[key_of(facts)] = {"facts": dict(facts), **entry}
        for oldest in list(entries)[:-MOST_ENTRIES]:
            del entries[oldest]
        text = json.dumps({"format": self._form, self._field: entries}, indent=1) + "\n"
        path = Path(os.path.realpath(self._path))  # a link stays one
        new = path.with_name(f"{path.name}.{os.getpid()}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(text)
            new.replace(path)
        except OSError as error:
            with suppress(OSError):
                new.unlink()
            raise self._unusable(str(error.strerror)) from error

    def _unusable(self, why: str) -> ConfigurationError:
        return ConfigurationError(
            f"measurements can't be kept in {self._path} ({why}); name another file with"
            f" {self._flag}"
        )

    def warn_of_damage(self) -> None:
        """Log that an entry lacks expected values, and is ignored."""
        logger.warning("an entry of %s is damaged, and is left out", self._path)
