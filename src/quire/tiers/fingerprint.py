"""Fingerprints of stored pages: a digest of all that determines their bytes.

Another process may read the pages, on another day, or with another version, machine or model. A
process finds pages only under the fingerprint of its own pages. So a fingerprint has all facts that
change the bytes, and no other facts, whose changes would only make stored pages useless. Tokens and
tenants are in the names of records, not here. Plain data: `assembly.tier_identity` collects the
facts.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from quire.observability.log import get_logger
from quire.tiers.disk.files import Files, read_whole, write_whole
from quire.tiers.disk.folder import CacheFolder

DIGEST_BYTES = 16
FORMAT = 1
"""Version of the parts and of their hashing."""

SUFFIX = ".json"
"""Suffix of a description's file, which lies beside its namespace and has its name."""
_NEW_SUFFIX = f"{SUFFIX}.new"
MAX_BYTES = 16 << 20
"""Limit of a description's size, which no real one reaches."""

logger = get_logger(__name__)

_PERSON = b"quire-pages"
_NO_PART = "nothing"
_SHOWN = ("model", "dtype", "kv_dtype", "quantization", "kernels", "block_size", "share")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """All that determines the bytes of pages, as JSON data: texts as keys, finite numbers."""

    #: Digest of the weights' content, in hexadecimal.
    weights: str
    #: The model's config.
    model: Mapping[str, Any]
    #: The layout of a page, and its groups.
    pages: Mapping[str, Any]
    #: The kernels and number formats.
    numerics: Mapping[str, Any]
    #: The sources that compute.
    code: Mapping[str, Any]
    #: The name of the model, for people; not a part of the digest.
    label: str = ""

    @property
    def digest(self) -> bytes:
        """A digest of DIGEST_BYTES bytes, equal for equal parts in every process."""
        parts = self._parts()
        del parts["label"]
        text = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
        digest = hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES, person=_PERSON)
        return digest.digest()

    def differences(self, other: "Fingerprint") -> list[str]:
        """The differences as phrases, such as "numerics.kernels is 'avx2' instead of 'torch'"."""
        mine, others = dict(_leaves(self._parts())), dict(_leaves(other._parts()))
        return [
            f"{name} is {mine.get(name, _NO_PART)!r} instead of {others.get(name, _NO_PART)!r}"
            for name in sorted(mine.keys() | others.keys())
            if name != "label" and mine.get(name, _NO_PART) != others.get(name, _NO_PART)
        ]

    @property
    def in_short(self) -> str:
        """A line for people that distinguishes namespaces."""
        facts = {**self.numerics, **self.pages, "model": self.model.get("architecture")}
        if facts.get("ranks", 1) > 1:
            facts["share"] = f"{facts['rank']} of {facts['ranks']}"
        texts = {name: str(facts.get(name)).removeprefix("torch.") for name in _SHOWN}
        return ", ".join(f"{name} {text}" for name, text in texts.items() if text != "None")

    def to_json(self) -> bytes:
        """The text for people and for `from_json`."""
        return json.dumps(self._parts(), indent=1, allow_nan=False).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Parse a text of `to_json`. Raises ValueError for another text or FORMAT."""
        parts = json.loads(text)
        if not isinstance(parts, dict) or parts.pop("format", None) != FORMAT:
            raise ValueError(f"this is no description of format {FORMAT}")
        texts = ("weights", "label")
        wanted = {"weights", "model", "pages", "numerics", "code", "label"}
        if parts.keys() != wanted or any(
            not isinstance(part, str if name in texts else dict) for name, part in parts.items()
        ):
            raise ValueError(f"a description has {', '.join(sorted(wanted))}")
        return cls(**parts)

    def _parts(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}


def joined(fingerprints: Sequence[Fingerprint]) -> list[Fingerprint]:
    """Fingerprints of each rank's pages that depend on those of all ranks, since the results of a
    rank depend on the weights of all."""
    digests = b"".join(each.digest for each in fingerprints)
    of_all = hashlib.blake2b(digests, digest_size=DIGEST_BYTES, person=_PERSON).hexdigest()
    return [replace(each, pages={**each.pages, "all_ranks": of_all}) for each in fingerprints]


def _leaves(part: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings, under names with dots. A list is a leaf."""
    if not isinstance(part, Mapping):
        yield name, list(part) if isinstance(part, tuple) else part
        return
    for key, inner in part.items():
        yield from _leaves(inner, f"{name}.{key}" if name else key)


def write_description(folder: CacheFolder, fingerprint: Fingerprint) -> None:
    """Write the description beside its namespace, for `quire cache`. Rank 0 also removes
    descriptions of namespaces that are gone. No function depends on these files; if they can't be
    written, a line is logged."""
    name = fingerprint.digest.hex()
    try:
        if folder.part.rank == 0:
            _remove_old_descriptions(folder, {name, *_own_names(folder)})
        if read_description(folder.path, name) is None:
            _write_description(folder, name, fingerprint.to_json())
    except OSError as error:
        logger.warning("%s: the description can't be written: %s", folder.path, error)


def read_description(folder: Path, name: str) -> Fingerprint | None:
    """The description of the namespace of that name; None if there is no valid one."""
    files = Files()
    try:
        descriptor = files.open_to_read(folder / f"{name}{SUFFIX}")
        try:
            text = read_whole(files, descriptor, min(files.size(descriptor), MAX_BYTES), 0)
        finally:
            files.close(descriptor)
        found = Fingerprint.from_json(text)
        return found if found.digest.hex() == name else None
    except (OSError, ValueError, RecursionError):  # RecursionError comes from very many brackets
        return None


def nearest_description(folder: CacheFolder, fingerprint: Fingerprint) -> Fingerprint | None:
    """The description with the fewest differences among the folder's other namespaces, except those
    of this engine's ranks; None if there is none. Raises OSError."""
    names = {path.name for path in folder.path.iterdir() if path.is_dir()} - _own_names(folder)
    found = [read_description(folder.path, name) for name in sorted(names) if is_namespace(name)]
    others = [each for each in found if each is not None and each.digest != fingerprint.digest]
    return min(others, key=lambda each: len(fingerprint.differences(each)), default=None)


def is_namespace(name: str) -> bool:
    """Whether a file's name may be a fingerprint's digest."""
    return len(name) == 2 * DIGEST_BYTES and set(name) <= set("0123456789abcdef")


def _own_names(folder: CacheFolder) -> set[str]:
    """The names of the namespaces in which the ranks of this engine write."""
    return {digest.hex() for digest in folder.part.fingerprints}


def _remove_old_descriptions(folder: CacheFolder, kept: set[str]) -> None:
    names = set(folder.files.names(folder.path))
    for each in sorted(names):
        described = each.removesuffix(".new").removesuffix(SUFFIX)
        is_left = each.endswith(_NEW_SUFFIX) or described not in names
        if described != each and is_namespace(described) and is_left and described not in kept:
            folder.files.unlink(folder.path / each)


def _write_description(folder: CacheFolder, name: str, text: bytes) -> None:
    files, new = folder.files, folder.path / f"{name}{_NEW_SUFFIX}"
    if os.path.lexists(new):  # left by a process that ended while it wrote
        files.unlink(new)
    descriptor = files.create(new)
    try:
        write_whole(files, descriptor, [text], 0)
    finally:
        files.close(descriptor)
    files.rename(new, folder.path / f"{name}{SUFFIX}")
