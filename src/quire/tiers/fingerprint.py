"""Fingerprints of stored pages (KV blocks): a digest of everything that determines their bytes.

A later process with another version, machine or model may open the same cache folder. It finds only
pages stored under its own fingerprint. So a fingerprint contains everything that changes the bytes,
and nothing else, because any change of the fingerprint makes the stored pages useless. Tokens and
tenants are in the names of records, not here. `assembly.tier_identity` collects the values.
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
"""Version of the fingerprint's fields and of the way they are hashed."""

SUFFIX = ".json"
"""A description is a fingerprint as a JSON file. It lies beside the folder of its namespace, and
has that folder's name plus this suffix."""
_NEW_SUFFIX = f"{SUFFIX}.new"
MAX_BYTES = 16 << 20
"""At most this many bytes of a description's file are read."""

logger = get_logger(__name__)

_PERSON = b"quire-pages"
_NO_PART = "nothing"
_SHOWN = ("model", "dtype", "kv_format", "quantization", "kernels", "block_size", "share")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Everything that determines the bytes of pages. The mappings are JSON data: keys are strings,
    and numbers are finite."""

    #: Digest of the weights' content, in hexadecimal.
    weights: str
    #: The model's config.
    model: Mapping[str, Any]
    #: The layout of a page, with its KV groups.
    pages: Mapping[str, Any]
    #: The kernels and number formats.
    numerics: Mapping[str, Any]
    #: Digests or versions of the source code that computes pages.
    code: Mapping[str, Any]
    #: The name of the model, for people; not a part of the digest.
    label: str = ""

    @property
    def digest(self) -> bytes:
        """A digest of DIGEST_BYTES bytes over all fields but `label`, the same in every process."""
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
        """The fingerprint as indented JSON, which `from_json` parses."""
        return json.dumps(self._parts(), indent=1, allow_nan=False).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Parse the result of `to_json`. Raises ValueError if `text` has another form or another
        FORMAT."""
        parts = json.loads(text)
        if not isinstance(parts, dict) or parts.pop("format", None) != FORMAT:
            raise ValueError(f"this is not a description of format {FORMAT}")
        texts = ("weights", "label")
        wanted = {"weights", "model", "pages", "numerics", "code", "label"}
        if parts.keys() != wanted or any(
            not isinstance(part, str if name in texts else dict) for name, part in parts.items()
        ):
            raise ValueError(f"a description must have the fields {', '.join(sorted(wanted))}")
        return cls(**parts)

    def _parts(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}


def joined(fingerprints: Sequence[Fingerprint]) -> list[Fingerprint]:
    """Each rank's fingerprint, combined with the fingerprints of all ranks. A rank's results depend
    on the weights of all ranks."""
    digests = b"".join(each.digest for each in fingerprints)
    of_all = hashlib.blake2b(digests, digest_size=DIGEST_BYTES, person=_PERSON).hexdigest()
    return [replace(each, pages={**each.pages, "all_ranks": of_all}) for each in fingerprints]


def _leaves(part: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted name, value) for each leaf of nested mappings. A list is a leaf."""
    if not isinstance(part, Mapping):
        yield name, list(part) if isinstance(part, tuple) else part
        return
    for key, inner in part.items():
        yield from _leaves(inner, f"{name}.{key}" if name else key)


def write_description(folder: CacheFolder, fingerprint: Fingerprint) -> None:
    """Write the description beside its namespace, for `quire cache`. Rank 0 also removes
    descriptions of namespaces that are gone. Serving does not need these files; if they can't be
    written, a warning is logged."""
    name = fingerprint.digest.hex()
    try:
        if folder.part.rank == 0:
            _remove_old_descriptions(folder, {name, *_own_names(folder)})
        if read_description(folder.path, name) is None:
            _write_description(folder, name, fingerprint.to_json())
    except OSError as error:
        logger.warning("%s: the description can't be written: %s", folder.path, error)


def read_description(folder: Path, name: str) -> Fingerprint | None:
    """The description of the namespace `name`; None if there is no valid description."""
    files = Files()
    try:
        descriptor = files.open_to_read(folder / f"{name}{SUFFIX}")
        try:
            text = read_whole(files, descriptor, min(files.size(descriptor), MAX_BYTES), 0)
        finally:
            files.close(descriptor)
        found = Fingerprint.from_json(text)
        return found if found.digest.hex() == name else None
    except (OSError, ValueError, RecursionError):  # RecursionError: JSON nested too deeply
        return None


def nearest_description(folder: CacheFolder, fingerprint: Fingerprint) -> Fingerprint | None:
    """The description that differs least from `fingerprint`, among the folder's namespaces that
    this engine does not use; None if there is no description. Raises OSError."""
    names = {path.name for path in folder.path.iterdir() if path.is_dir()} - _own_names(folder)
    found = [read_description(folder.path, name) for name in sorted(names) if is_namespace(name)]
    others = [each for each in found if each is not None and each.digest != fingerprint.digest]
    return min(others, key=lambda each: len(fingerprint.differences(each)), default=None)


def is_namespace(name: str) -> bool:
    """True if `name` has the form of a fingerprint's digest in hexadecimal."""
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
