"""Formats the table of `quire bench perplexity`, in Markdown, one row at a time."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.bench.quality.measuring import Combination, Measured

EMBEDDED = "embedded model"
NONE = "none"
AS_STORED = "as stored"

_FIGURES = (
    *(("perplexity", 10), ("change", 16), ("mean KLD", 8), ("99% KLD", 8), ("same top", 8)),
    *(("bits a weight", 13), ("weights MiB", 11), ("KV bytes a token", 18)),
)


def model_name(model: str | None) -> str:
    """The model's name in the table: the last part of its path."""
    return EMBEDDED if model is None else os.path.basename(model.rstrip("/")) or model


class Table:
    """A table with columns for the figures, and for labels that differ between combinations."""

    def __init__(
        self, combinations: "Sequence[Combination]", quantized: frozenset[str | None]
    ) -> None:
        """`quantized` are the models whose files have quantized weights."""
        self._quantized = quantized
        labels = [self._labels(each) for each in combinations]
        always = {"weights"}
        self._columns = {
            name: max(len(name), *(len(each[name]) for each in labels))
            for name in labels[0]
            if name in always or len({each[name] for each in labels}) > 1
        }

    def head(self) -> str:
        """The two lines of the table's head."""
        widths = [*self._columns.values(), *(width for _, width in _FIGURES)]
        names = [*self._columns, *(name for name, _ in _FIGURES)]
        marks = ["-" * width for width in self._columns.values()]
        marks += [f"{'-' * (width - 1)}:" for _, width in _FIGURES]
        return f"{_row(names, widths)}\n{_row(marks, widths)}"

    def row(self, combination: "Combination", found: "Measured", *, is_reference: bool) -> str:
        """The row of a measured combination."""
        quality = found.quality
        cells = [f"{quality.perplexity:.4f}", *[""] * 4]
        if not is_reference:
            error = 100 * quality.loss_change_error * (1 + quality.change)
            cells[1:] = [
                f"{100 * quality.change:+.2f}% ± {error:.2f}",
                f"{quality.divergence:.5f}",
                f"{quality.divergence_p99:.4f}",
                f"{100 * quality.agreement:.2f}%",
            ]
        cells += [
            f"{found.linear_bits:.2f}",
            f"{found.weight_bytes / 2**20:,.1f}",
            f"{found.token_bytes:,}{' (simulated)' if found.is_simulated else ''}",
        ]
        labels = self._labels(combination)
        widths = [*self._columns.values(), *(width for _, width in _FIGURES)]
        aligned = [f"{cell:>{width}}" for cell, (_, width) in zip(cells, _FIGURES, strict=True)]
        return _row([*(labels[name] for name in self._columns), *aligned], widths)

    def refusal(self, combination: "Combination", reason: str) -> str:
        """The row of a combination that can't be measured."""
        labels = self._labels(combination)
        cells = [labels[name] for name in self._columns]
        return _row([*cells, f"not measured: {reason}"], [*self._columns.values(), 0])

    def _labels(self, combination: "Combination") -> dict[str, str]:
        stored = AS_STORED if combination.model in self._quantized else NONE
        return {
            "model": model_name(combination.model),
            "dtype": combination.dtype or "auto",
            "weights": combination.quantization or stored,
            "KV": combination.kv_cache_dtype,
        }


def as_data(combination: "Combination", found: "Measured") -> dict[str, Any]:
    """A measured combination with all figures, for JSON."""
    quality = found.quality
    sizes = {name: value for name, value in asdict(found).items() if name != "quality"}
    return {
        "model_id": combination.model or EMBEDDED,
        "quantization": combination.quantization,
        "kv_cache_dtype": combination.kv_cache_dtype,
        **sizes,
        "perplexity": quality.perplexity,
        "change": quality.change,
        **asdict(quality),
    }


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"| {' | '.join(padded)} |"
