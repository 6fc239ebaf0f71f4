"""Keeps what number formats cost a model in quality, for `quire doctor`.

    ~/.cache/quire/quality.json     what `quire bench perplexity` measured on this machine
    known_quality.json              the same of models that quire comes with

Without torch, as `quire doctor` reads it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.hub.folder_digest import folder_digest
from quire.kept_entries import KeptEntries

DEFAULT_QUALITY_FILE = "~/.cache/quire/quality.json"
FLAG = "--quality-file"
LEAST_TOKENS = 500
"""What was measured on fewer is not kept: its error is as large as what is measured."""

_KNOWN = Path(__file__).with_name("known_quality.json")
_FORMAT = 1
_ARITHMETIC = {"int8": 2, "int4": 3}
"""By weight format, 1 for all others: to be raised by every change of its arithmetic or rounding,
so that what was measured before is not found."""
_FIGURES = ("change", "loss_change_error", "divergence", "agreement", "num_tokens")


@dataclass(frozen=True, slots=True)
class KeptQuality:
    """The measured cost of one combination of formats for a model, in the figures of
    `comparison.Quality`."""

    quantization: str | None
    kv_cache_dtype: str
    dtype: str

    #: The model and the dtype that the combination was compared with.
    reference: str

    change: float
    loss_change_error: float
    divergence: float
    agreement: float
    num_tokens: int

    #: Names of the files that were read.
    texts: str

    #: Day of the measurement, in ISO form.
    date: str

    #: The version of quire that measured.
    version: str


def keep_quality(
    path: Path, folder: Path, result: Mapping[str, Any], origin: Mapping[str, str]
) -> None:
    """Keep what was measured on enough tokens. folder: of the model. result: as `table.as_data`
    gives it. origin: reference, texts, date and version of `KeptQuality`. Raises ConfigurationError
    where the file can't be written."""
    if result["num_tokens"] < LEAST_TOKENS:
        return
    names = ("quantization", "kv_cache_dtype", "dtype")
    facts = {"model": folder_digest(folder)} | {name: result[name] for name in names}
    facts["arithmetic"] = _arithmetic(result["quantization"])
    figures = {name: result[name] for name in _FIGURES}
    _open(path).keep(facts, {"model_id": result["model_id"], **figures, **origin})


def find_quality(path: Path, folder: Path) -> list[KeptQuality]:
    """All that is kept of the model of `folder` and was measured with today's arithmetic: in the
    file at `path`, and of what quire comes with, as far as nothing was measured in its place."""
    digest = folder_digest(folder)
    found: dict[str, KeptQuality] = {}
    for entries in (_open(_KNOWN), _open(path)):
        for key, entry in entries.read().items():
            if entry["facts"].get("model") != digest:
                continue
            try:
                if entry["facts"].get("arithmetic") == _arithmetic(entry["facts"]["quantization"]):
                    found[key] = _read(entry)
            except (KeyError, TypeError, ValueError):
                entries.warn_of_damage()
    return list(found.values())


def _arithmetic(quantization: str | None) -> int:
    return _ARITHMETIC.get(quantization or "", 1)


def _open(path: Path) -> KeptEntries:
    return KeptEntries(path, "quality", _FORMAT, FLAG)


def _read(entry: Mapping[str, Any]) -> KeptQuality:
    facts, quantization = entry["facts"], entry["facts"]["quantization"]
    return KeptQuality(
        quantization=None if quantization is None else str(quantization),
        kv_cache_dtype=str(facts["kv_cache_dtype"]),
        dtype=str(facts["dtype"]),
        reference=str(entry["reference"]),
        change=float(entry["change"]),
        loss_change_error=float(entry["loss_change_error"]),
        divergence=float(entry["divergence"]),
        agreement=float(entry["agreement"]),
        num_tokens=int(entry["num_tokens"]),
        texts=str(entry["texts"]),
        date=str(entry["date"]),
        version=str(entry["version"]),
    )
