"""Decoding over long contexts: quire and its peers, alternating in one run, beside the floor.

    python -m benchmarks.cpu.long_context --setup peers.toml --model llama-160m \\
        --cases 1x8192,1x16384,1x32768,16x8192 --rounds 3 --out long.json --markdown long.md

The floor is weight and KV bytes over the bandwidth that was measured in the same run. Each engine
is a process of its own (`peers/quire_long_context.py` and its siblings), and they take turns.
quire's contexts are filled with random numbers; peers compute theirs. Whether memory is linear
in the context shows in quire's resident bytes beside the bytes of K and V.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cpu.floors import PRECISIONS, Floors, ModelShape, Roofline
from benchmarks.cpu.peer_setup import HERE, OURS, EngineSetup, Model, SetupError, choose, read_setup
from benchmarks.cpu.tables import LOUD_CORES, NONE, number, roofline_note, table


@dataclass(slots=True)
class Found:
    """All that was measured. cases: engine -> its cases' results, of all rounds."""

    rooflines: list[dict[str, Any]] = field(default_factory=list)
    cases: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def median(self, engine: str, case: str) -> tuple[float, bool] | None:
        """Tokens per second over the quiet repetitions, else over all; whether they were quiet."""
        rows = [
            row for one in self.cases.get(engine, []) if one["case"] == case for row in one["rows"]
        ]
        quiet = [row for row in rows if row["other_cpus"] + row["steal_cpus"] <= LOUD_CORES]
        if not rows:
            return None
        return statistics.median(row["tok_s"] for row in quiet or rows), bool(quiet)

    def rss_bytes(self, engine: str, case: str) -> int | None:
        """The least of its rounds; None where it is not known."""
        sizes = [
            one["rss_bytes"]
            for one in self.cases.get(engine, [])
            if one["case"] == case and one["rss_bytes"] is not None
        ]
        return min(sizes, default=None)


def run(args: argparse.Namespace, engines: Sequence[EngineSetup], model: Model) -> Found:
    """All rounds."""
    args.folder.mkdir(parents=True, exist_ok=True)
    found = Found()
    for index in range(args.rounds):
        found.rooflines.append(_measure_roofline(args, index))
        for engine in engines if index % 2 == 0 else engines[::-1]:
            result = _measure(args, engine, model, index)
            if result is not None:
                found.cases.setdefault(engine.key, []).extend(result["cases"])
                found.versions[engine.key] = result["version"]
            args.out.write_text(
                json.dumps({"rooflines": found.rooflines, "cases": found.cases}, indent=1) + "\n"
            )
    return found


def _measure_roofline(args: argparse.Namespace, index: int) -> dict[str, Any]:
    out = args.folder / f"roofline.{index}.json"
    words = [str(HERE / "roofline.py"), "--threads", str(args.threads), "--out", str(out)]
    subprocess.run([*args.prefix, sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    return dict(json.loads(out.read_text()))


def _measure(
    args: argparse.Namespace, engine: EngineSetup, model: Model, index: int
) -> dict[str, Any] | None:
    """The result file of one process, or None if it failed."""
    out = args.folder / f"{engine.key.replace(' ', '-')}.{index}.json"
    out.unlink(missing_ok=True)
    common = {
        "--model": engine.models[model.name].path,
        "--out": out,
        "--label": engine.precision,
        "--threads": args.threads,
        "--cases": args.cases,
        "--steps": args.steps,
    }
    words = [str(word) for pair in common.items() for word in pair]
    environment = {**os.environ, **engine.environment, "PYTHONPATH": str(HERE.parents[1] / "src")}
    log = out.with_suffix(".log")
    with log.open("w") as file:
        status = subprocess.run(
            [*args.prefix, *engine.long_context, *words], stdout=file, stderr=file, env=environment
        ).returncode
    print(f"{engine.key}, round {index}: ended with {status}", file=sys.stderr)
    if status != 0:
        print(f"failed: see {log}", file=sys.stderr)
    return json.loads(out.read_text()) if out.exists() else None


def make_report(found: Found, engines: Sequence[EngineSetup], model: Model, cases: str) -> str:
    """One line for each precision and case."""
    roofline, shape = Roofline.best(found.rooflines), ModelShape.from_folder(model.folder)
    peers = list(dict.fromkeys(one.name for one in engines if one.name != OURS))
    header = ["decode, tokens per second", OURS, *peers, "floor", "share of floor"]
    header += ["KV MiB", "quire's resident MiB"]
    rows = []
    for precision in dict.fromkeys(one.precision for one in engines):
        floors = Floors(shape, PRECISIONS[precision], roofline)
        for case in cases.split(","):
            num_seqs, context = (int(word) for word in case.split("x"))
            floor = floors.decode_tok_s([context] * num_seqs)
            medians = {name: found.median(f"{name} {precision}", case) for name in (OURS, *peers)}
            ours = medians[OURS]
            rss = found.rss_bytes(f"{OURS} {precision}", case)
            kv_bytes = num_seqs * context * shape.kv_bytes_per_token
            rows.append(
                [
                    f"{model.name} {precision}, {num_seqs} x {context:,}",
                    *(_cell(medians[name]) for name in (OURS, *peers)),
                    number(floor),
                    NONE if ours is None else f"{ours[0] / floor:.0%}",
                    f"{kv_bytes / 2**20:,.0f}",
                    NONE if rss is None else f"{rss / 2**20:,.0f}",
                ]
            )
    versions = ", ".join(f"{key}: {one}" for key, one in found.versions.items())
    note = f"{roofline_note(found.rooflines)}\n{versions}."
    return f"{table(header, rows)}\n\n{note}"


def _cell(median: tuple[float, bool] | None) -> str:
    return NONE if median is None else f"{number(median[0])}{'' if median[1] else ' (loud)'}"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--setup", type=Path, required=True, help="models and engines; see cpu_setup.py")
    add("--model", required=True, help="one of the set-up's, by name")
    add("--out", type=Path, required=True)
    add("--markdown", type=Path)
    add("--folder", type=Path, help="raw results and logs; default: beside --out")
    add("--cases", default="1x8192,1x16384,1x32768,16x8192", help="the smallest memory first")
    add("--steps", type=int, default=16)
    add("--rounds", type=int, default=3)
    add("--engines", type=lambda text: text.split(","), default=[], help="only these, by name")
    add("--precisions", type=lambda text: text.split(","), default=["bf16"])
    add("--quire-arguments", type=shlex.split, default=[], help="such as --kernels=avx512")
    add("--threads", type=int, default=2)
    add("--prefix", type=shlex.split, default=[], help="words before every command")
    args = parser.parse_args(argv)
    args.folder = args.folder or args.out.with_suffix(".raw")
    for name in ("rounds", "steps", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}, but must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        whole = read_setup(args.setup, tuple(args.quire_arguments))
        setup = choose(whole, [args.model], args.engines, args.precisions)
    except SetupError as error:
        sys.exit(f"cpu_long_context.py: error: {error}")
    model = setup.models[0]
    engines = [one for one in setup.engines if one.long_context and model.name in one.models]
    report = make_report(run(args, engines, model), engines, model, args.cases)
    print(report)
    if args.markdown:
        args.markdown.write_text(report + "\n")


if __name__ == "__main__":
    main()
