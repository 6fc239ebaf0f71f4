"""Stores the measured quality costs of number formats, for `quire doctor`.

    ~/.cache/quire/quality.json     results of `quire bench perplexity` on this machine
    known_quality.json              results that are part of quire's package

The module does not import torch, so that `quire doctor` starts quickly.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.hub.folder_digest import folder_digest
from quire.measurement_file import MeasurementFile

DEFAULT_QUALITY_FILE = "~/.cache/quire/quality.json"
FLAG = "--quality-file"
LEAST_TOKENS = 500
"""Results on fewer tokens are not stored, since their error is as large as the measured cost."""

_KNOWN = Path(__file__).with_name("known_quality.json")
_FORMAT = 1
_ARITHMETIC = {"": 2, "int8": 3, "int4": 3}
"""Versions of the weight formats' arithmetic; formats that are not listed have version 1. "" stands
for weights as the checkpoint has them, quantized or not. Every change of arithmetic or rounding
must raise the version, so that older results are not found."""
_FIGURES = ("change", "loss_change_error", "divergence", "agreement", "num_tokens")


@dataclass(frozen=True, slots=True)
class MeasuredQuality:
    """The measured cost of one combination of formats for a model.

    `comparison.Quality` explains the figures.
    """

    quantization: str | None
    kv_cache_dtype: str
    dtype: str

    #: Names the model and the dtype with which the combination was compared.
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


def store_quality(
    path: Path, folder: Path, result: Mapping[str, Any], origin: Mapping[str, str]
) -> None:
    """Store a result of `table.as_data`, unless it was measured on too few tokens.

    `folder` is the model's folder. `origin` has the reference, texts, date and version of
    `MeasuredQuality`.
    Raises ConfigurationError if the file can't be written.
    """
    if result["num_tokens"] < LEAST_TOKENS:
        return
    names = ("quantization", "kv_cache_dtype", "dtype")
    facts = {"model": folder_digest(folder)} | {name: result[name] for name in names}
    facts["arithmetic"] = _arithmetic(result["quantization"])
    figures = {name: result[name] for name in _FIGURES}
    _open(path).store(facts, {"model_id": result["model_id"], **figures, **origin})


def find_quality(path: Path, folder: Path) -> list[MeasuredQuality]:
    """The results of the model in `folder` that were measured with the current arithmetic.

    They are read from the file at `path` and from quire's own file. If a combination is in both
    files, the result at `path` is returned.
    """
    digest = folder_digest(folder)
    found: dict[str, MeasuredQuality] = {}
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


def _open(path: Path) -> MeasurementFile:
    return MeasurementFile(path, "quality", _FORMAT, FLAG)


def _read(entry: Mapping[str, Any]) -> MeasuredQuality:
    facts, quantization = entry["facts"], entry["facts"]["quantization"]
    return MeasuredQuality(
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
