"""The table of quality beside speed, and the peers' formats beside ours of no less quality.

Knows no process, no clock and no file.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.cpu.peer_setup import OURS
from benchmarks.cpu.tables import NONE, Cell, Results, table

REFERENCE = "transformers fp32"

#: Column titles by the regime's name in the results of `cpu.py`.
REGIMES = {"decode1": "one stream", "prefill512": "prefill 512", "workload": "crowd"}

# A divergence that is larger by no more than this share counts as no larger: two ways to compute
# one format differ by as much.
EQUAL_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Row:
    """One engine at one precision: what its distributions are worth, and how fast it is."""

    #: "name precision", as in the results of speed.
    key: str
    #: Bits of all weights, divided by the model's number of parameters; None if unknown.
    bits_per_weight: float | None
    perplexity: float
    #: Perplexity divided by the reference's, less one.
    increase: float
    #: Standard error of `increase`, by the differences of losses at the same tokens.
    increase_error: float
    #: Mean Kullback-Leibler divergence from the reference, in nats; the reference has 0.
    divergence: float
    #: Share of the tokens whose likeliest prediction is the reference's.
    agreement: float
    #: Tokens per second by regime; one that was not measured is missing.
    speeds: Mapping[str, Cell]

    @property
    def is_ours(self) -> bool:
        return self.key.partition(" ")[0] == OURS


def find_rows(
    found: Mapping[str, Mapping[str, Any]], speed: Results, model: str, num_parameters: int
) -> list[Row]:
    """found: result files of the quality drivers by key, the reference's among them."""
    exact = found[REFERENCE]["losses"]
    return [_row(key, one, exact, speed, (model, num_parameters)) for key, one in found.items()]


def _row(
    key: str,
    found: Mapping[str, Any],
    exact: Sequence[float],
    speed: Results,
    model: tuple[str, int],
) -> Row:
    name, num_parameters = model
    changes = [loss - known for loss, known in zip(found["losses"], exact, strict=True)]
    ratio = math.exp(statistics.fmean(changes))
    error = statistics.stdev(changes) / math.sqrt(len(changes))
    weight_bytes = found["weight_bytes"]
    cells = {regime: _cell(speed, key, name, regime) for regime in REGIMES}
    return Row(
        key=key,
        bits_per_weight=8 * weight_bytes / num_parameters if weight_bytes else None,
        perplexity=math.exp(statistics.fmean(found["losses"])),
        increase=ratio - 1,
        increase_error=ratio * error,
        divergence=statistics.fmean(found["divergences"] or [0.0]),
        agreement=statistics.fmean(found["agreements"] or [1.0]),
        speeds={regime: cell for regime, cell in cells.items() if cell is not None},
    )


def _cell(speed: Results, key: str, model: str, regime: str) -> Cell | None:
    """The median of the quiet repetitions, or of all where none was."""
    quiet = speed.values(key, model, regime, quiet=True)
    values = quiet or speed.values(key, model, regime, quiet=False)
    return Cell(statistics.median(values), bool(quiet)) if values else None


def make_report(rows: Sequence[Row]) -> str:
    """Both tables. The second compares each peer's format with ours of at most its divergence."""
    return "\n\n".join([_main_table(rows), _pairs_table(rows)])


def _main_table(rows: Sequence[Row]) -> str:
    header = ["", "bits a weight", "perplexity", "against fp32", "mean KLD", "same top token"]
    header += [f"{title}, tok/s" for title in REGIMES.values()]
    lines = []
    for row in rows:
        bits = NONE if row.bits_per_weight is None else f"{row.bits_per_weight:.2f}"
        is_reference = row.key == REFERENCE
        compared = [
            f"{row.increase:+.2%} ± {100 * row.increase_error:.2f}",
            f"{row.divergence:.5f}",
            f"{row.agreement:.2%}",
        ]
        lines.append(
            [
                f"**{row.key}**" if row.is_ours else row.key,
                bits,
                f"{row.perplexity:.3f}",
                *([""] * len(compared) if is_reference else compared),
                *(str(row.speeds.get(regime, NONE)) for regime in REGIMES),
            ]
        )
    return table(header, lines)


def _pairs_table(rows: Sequence[Row]) -> str:
    header = ["quire's fastest of no less quality, against", *REGIMES.values()]
    lines = []
    for peer in rows:
        if peer.is_ours or not peer.speeds:
            continue
        lines.append([peer.key, *(_ratio(rows, peer, regime) for regime in REGIMES)])
    return table(header, lines)


def _ratio(rows: Sequence[Row], peer: Row, regime: str) -> str:
    """The ratio of our fastest format that diverges no more, as "1.42x (int8)"."""
    most = peer.divergence * (1 + EQUAL_SHARE)
    as_good = [row for row in rows if row.is_ours and row.divergence <= most]
    measured = [row for row in as_good if regime in row.speeds]
    if regime not in peer.speeds or not measured:
        return NONE
    best = max(measured, key=lambda row: row.speeds[regime].tok_s)
    ratio = best.speeds[regime].tok_s / peer.speeds[regime].tok_s
    return f"{ratio:.2f}x ({best.key.partition(' ')[2]})"


def make_notes(facts: Mapping[str, Any]) -> str:
    """Name the text that was read, and the versions. facts: as `comparison.py` writes them."""
    versions = {one["peer"]: f"{one['peer']} {one['version']}" for one in facts["engines"].values()}
    lines = [
        f"{facts['model']}: perplexity of {facts['num_predicted']:,} tokens, the second halves of"
        f" {facts['num_windows']} windows of {facts['window_tokens']:,} tokens, of"
        f" {', '.join(facts['texts'])}; the same token ids for all. ±: one standard error.",
        f"Quality by {', '.join(versions.values())}.",
    ]
    return "\n".join([*lines, *(f"FAILED: {failure}" for failure in facts["failures"])])
