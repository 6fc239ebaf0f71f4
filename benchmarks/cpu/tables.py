"""The results of `cpu.py` as a table in Markdown: figure, peers, ratio, floor and share of it.

    python -m benchmarks.cpu.tables --setup peers.toml cpu.json [more.json ...]

A figure is the median of its quiet repetitions; where there were none it is marked. The best peer
is the fastest at the same precision. Knows no process and no clock.
"""

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cpu.floors import PRECISIONS, Floors, ModelShape, Roofline
from benchmarks.cpu.peer_setup import OURS, EngineSetup, Model, read_setup
from quire.bench.workload import WorkloadSpec, request_lengths

TITLES = {
    "decode1": "one stream",
    "prefill512": "prefill 512",
    "prefill2048": "prefill 2,048",
    "workload": "crowd of {count}",
}
NONE = "-"
# A figure during which others took more is thrown away.
LOUD_CORES = 0.1


@dataclass(frozen=True, slots=True)
class Sample:
    """One repetition: tokens per second, and how many cores others took meanwhile."""

    engine: str
    model: str
    regime: str
    round_index: int
    tok_s: float
    other_cores: float


@dataclass(slots=True)
class Results:
    """Everything measured. engine is always "name precision".

    rooflines: as `roofline.py` writes them. facts: "engine model" -> peak memory
    and start-up. failures: [engine, model, what] of processes that ended badly.
    """

    samples: list[Sample] = field(default_factory=list)
    rooflines: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: list[list[str]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "Results":
        """Read the results that `cpu.py` wrote."""
        raw = json.loads(path.read_text())
        samples = [Sample(**one) for one in raw.pop("samples")]
        return cls(samples, **raw)

    def add(self, other: "Results") -> None:
        """Take in another run on the same machine."""
        self.samples += other.samples
        self.rooflines += other.rooflines
        self.failures += other.failures
        self.versions |= other.versions
        self.facts |= other.facts

    def values(self, engine: str, model: str, regime: str, *, quiet: bool) -> list[float]:
        """Tokens per second of its repetitions: of the quiet ones, or of all."""
        wanted = (engine, model, regime)
        return [
            one.tok_s
            for one in self.samples
            if (one.engine, one.model, one.regime) == wanted
            and (one.other_cores <= LOUD_CORES or not quiet)
        ]

    def num_quiet(self, engine: EngineSetup, model: str, regime: str) -> int:
        return len(self.values(engine.key, model, regime, quiet=True))

    def has_failed(self, engine: EngineSetup, model: str) -> bool:
        return any(failure[:2] == [engine.key, model] for failure in self.failures)


@dataclass(frozen=True, slots=True)
class Cell:
    """A median; is_quiet False: no repetition was."""

    tok_s: float
    is_quiet: bool

    def __str__(self) -> str:
        return f"{number(self.tok_s)}{'' if self.is_quiet else ' (loud)'}"


@dataclass(frozen=True, slots=True)
class Line:
    """One regime of one model at one precision. peers: by name."""

    model: str
    precision: str
    regime: str
    title: str
    ours: Cell | None
    peers: dict[str, Cell]
    floor_tok_s: float

    @property
    def ratio(self) -> float | None:
        """quire over the best peer; None where one of the two is missing."""
        if self.ours is None or not self.peers:
            return None
        return self.ours.tok_s / max(cell.tok_s for cell in self.peers.values())

    @property
    def share(self) -> float | None:
        """quire's part of the floor."""
        return None if self.ours is None else self.ours.tok_s / self.floor_tok_s


def number(value: float) -> str:
    """Three digits or more: 28.7, 142, 2,248."""
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def find_lines(results: Results, models: Sequence[Model]) -> list[Line]:
    """All regimes that quire or a peer was measured in."""
    roofline, lines = Roofline.best(results.rooflines), []
    for model in models:
        lengths = request_lengths(WorkloadSpec(num_prompts=48, limit=model.num_requests))
        shape = ModelShape.from_folder(model.folder)
        for precision in PRECISIONS.values():
            floors = Floors(shape, precision, roofline)
            floor_of = {
                "decode1": floors.one_stream_tok_s(),
                "prefill512": floors.prefill_tok_s(512),
                "prefill2048": floors.prefill_tok_s(2048),
                "workload": floors.crowd_tok_s(lengths, model.max_num_seqs),
            }
            for regime, floor in floor_of.items():
                cells = _cells(results, model.name, precision.name, regime)
                if not cells:
                    continue
                title = TITLES[regime].format(count=model.num_requests)
                ours = cells.pop(OURS, None)
                lines.append(Line(model.name, precision.name, regime, title, ours, cells, floor))
    return lines


def _cells(results: Results, model: str, precision: str, regime: str) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for engine in dict.fromkeys(one.engine for one in results.samples):
        name, _, its_precision = engine.rpartition(" ")
        quiet = results.values(engine, model, regime, quiet=True)
        values = quiet or results.values(engine, model, regime, quiet=False)
        if its_precision == precision and values:
            cells[name] = Cell(statistics.median(values), bool(quiet))
    return cells


def make_report(results: Results, models: Sequence[Model]) -> str:
    """The tables and the lines below them."""
    lines = find_lines(results, models)
    return "\n\n".join(
        [
            _speed_table(lines),
            _memory_table(results, models),
            "\n".join(_notes(results, models)),
        ]
    )


def _speed_table(lines: Sequence[Line]) -> str:
    peers = list(dict.fromkeys(name for line in lines for name in line.peers))
    header = ["tokens per second", OURS, *peers, "ratio to best peer", "floor", "share of floor"]
    rows = []
    for line in lines:
        cells = [str(line.peers.get(name, NONE)) for name in peers]
        ratio = NONE if line.ratio is None else f"{line.ratio:.2f}x"
        share = NONE if line.share is None else f"{line.share:.0%}"
        rows.append(
            [
                f"{line.model} {line.precision}, {line.title}",
                NONE if line.ours is None else f"**{line.ours}**",
                *cells,
                ratio,
                number(line.floor_tok_s),
                share,
            ]
        )
    return table(header, rows)


def _memory_table(results: Results, models: Sequence[Model]) -> str:
    header = ["", *(f"{model.name}: peak MiB (start s)" for model in models)]
    rows = []
    for engine in dict.fromkeys(one.engine for one in results.samples):
        found = [results.facts.get(f"{engine} {model.name}") for model in models]
        cells = [
            NONE if one is None else f"{one['peak_rss_mib']:,} ({one['load_s'] or 0:.1f})"
            for one in found
        ]
        rows.append([engine, *cells])
    return table(header, rows)


def _notes(results: Results, models: Sequence[Model]) -> Iterable[str]:
    roofline = Roofline.best(results.rooflines)
    yield roofline_note(results.rooflines)
    num_loud = sum(one.other_cores > LOUD_CORES for one in results.samples)
    num_rounds = len({one.round_index for one in results.samples})
    yield (
        f"Medians over {len(results.samples) - num_loud} repetitions in {num_rounds} rounds;"
        f" {num_loud} more were thrown away, since others took over {LOUD_CORES} cores."
    )
    yield f"Versions: {', '.join(f'{key}: {one}' for key, one in results.versions.items())}."
    for model in models:
        shape = ModelShape.from_folder(model.folder)
        lengths = request_lengths(WorkloadSpec(num_prompts=48, limit=model.num_requests))
        bounds = (
            f"{name} {number(Floors(shape, one, roofline).crowd_ops_tok_s(lengths))}"
            for name, one in PRECISIONS.items()
        )
        yield f"{model.name}: operations alone bound the crowd's output by {', '.join(bounds)}."
    for engine, model_name, what in results.failures:
        yield f"FAILED: {engine}, {model_name}: {what}"


def is_loud(measured: Mapping[str, Any]) -> bool:
    """Whether others disturbed one measurement of the roofline."""
    return (measured["other_cpus"] or 0.0) + (measured["steal_cpus"] or 0.0) > LOUD_CORES


def roofline_note(measured: Sequence[Mapping[str, Any]]) -> str:
    """The machine and its best figures, in a sentence."""
    best = Roofline.best(measured)
    rates = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in best.ops_s.items())
    warning = " LOUD in every round: the floors are too low." if all(map(is_loud, measured)) else ""
    return (
        f"{measured[0]['processor']}, {measured[0]['threads']} threads:"
        f" {best.read_bytes_s / 1e9:.1f} GB/s read; {rates} G operations/s in large products."
        + warning
    )


def table(header: list[str], rows: list[list[str]]) -> str:
    """Markdown, numbers to the right."""
    listed = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in listed)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--setup", type=Path, required=True, help="for the models' shapes")
    parser.add_argument("--lines", type=Path, help="the table's lines, as JSON")
    args = parser.parse_args(argv)
    whole = Results()
    for path in args.results:
        whole.add(Results.read(path))
    models = read_setup(args.setup).models
    print(make_report(whole, models))
    if args.lines:
        lines = [
            {**asdict(line), "ratio": line.ratio, "share": line.share}
            for line in find_lines(whole, models)
        ]
        args.lines.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
