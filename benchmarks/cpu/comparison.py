"""quire and its peers on a CPU, alternating in one run, beside what the machine allows.

    python benchmarks/cpu.py --setup peers.toml --rounds 3 --out cpu.json --markdown cpu.md

Each engine is a process of its own, in its own environment, that measures all regimes of one model
and ends; the engines take turns, in the opposite order every other round. A repetition during which
others took more than 0.1 cores is thrown away, and measured again after the rounds. The machine's
roofline is measured in turn with the engines. See `peer_setup.py` for the file, `floors.py` for
the floors and `peers/driver.py` for the regimes.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cpu.peer_setup import (
    HERE,
    PARTS,
    EngineSetup,
    Model,
    Setup,
    SetupError,
    check_arguments,
    choose,
    listed_words,
    read_setup,
)
from benchmarks.cpu.tables import Results, Sample, is_loud, make_report
from quire.bench.workload import WorkloadSpec, request_lengths

NUM_REQUESTS = 48

# Name in the result file -> (part of the driver, column of its rows).
REGIMES = {
    "decode1": ("decode1", "decode_tok_s"),
    "prefill512": ("prefill", "prefill_tok_s"),
    "prefill2048": ("prefill", "prefill_tok_s"),
    "workload": ("workload", "output_tok_s"),
}


@dataclass(slots=True)
class Bench:
    """Runs drivers and keeps what they found; `out` is whole after every process.

    prefix: words before every command, such as `numactl --membind 0` or a lock's.
    folder: where the raw results and the logs of the processes go.
    """

    setup: Setup
    args: argparse.Namespace
    folder: Path
    results: Results
    prefix: list[str] = field(default_factory=list)

    def run(self) -> None:
        """All rounds, then again what was loud."""
        self._write_workload()
        for index in range(self.args.rounds):
            self._measure_roofline(index)
            for model in self.setup.models:
                engines = [one for one in self.setup.engines if model.name in one.models]
                for engine in engines if index % 2 == 0 else engines[::-1]:
                    self._measure(engine, model, self._wanted(engine), index)
        for index in range(self.args.rounds, self.args.rounds + self.args.retries):
            self._measure_again(index)

    def _wanted(self, engine: EngineSetup) -> set[str]:
        return set(self.args.parts) - engine.skip

    def _measure_again(self, index: int) -> None:
        """Repeat the parts that had too few quiet repetitions."""
        if all(map(is_loud, self.results.rooflines)):
            self._measure_roofline(index)
        for model in self.setup.models:
            for engine in self.setup.engines:
                if model.name not in engine.models or self.results.has_failed(engine, model.name):
                    continue
                parts = {
                    part
                    for regime, (part, _) in REGIMES.items()
                    if part in self._wanted(engine)
                    and self.results.num_quiet(engine, model.name, regime) < self.args.rounds
                }
                self._measure(engine, model, parts, index)

    def _measure(self, engine: EngineSetup, model: Model, parts: set[str], index: int) -> None:
        if not parts:
            return
        stem = self.folder / f"{model.name}.{engine.key.replace(' ', '-')}.{index}"
        out = stem.with_name(stem.name + ".json")
        out.unlink(missing_ok=True)
        command = self._command(engine, model, parts, out)
        started_s = time.monotonic()
        status = self._call(command, engine, stem.with_name(stem.name + ".log"))
        took_s = time.monotonic() - started_s
        print(f"{model.name}, {engine.key}, round {index}: {took_s:.0f} s", file=sys.stderr)
        key = [engine.key, model.name]
        self.results.failures = [one for one in self.results.failures if one[:2] != key]
        if status != 0:
            failure = f"{stem.name}.log: ended with {status}"
            print(f"failed: {failure}: {shlex.join(command)}", file=sys.stderr)
            self.results.failures.append([*key, failure])
        if out.exists():
            self._collect(engine, model, index, json.loads(out.read_text()))
        self._save()

    def _command(self, engine: EngineSetup, model: Model, parts: set[str], out: Path) -> list[str]:
        placed, args = engine.models[model.name], self.args
        common = {
            "--model": placed.path,
            "--workload": self.folder / "workload.json",
            "--out": out,
            "--label": engine.precision,
            "--threads": args.threads,
            "--max-batch": model.max_num_seqs,
            "--reps": args.reps,
            "--limit": model.num_requests,
            "--quiet-wait": args.quiet_wait,
            "--skip": ",".join(part for part in PARTS if part not in parts),
        }
        if args.pause_pidfile:
            common["--pause-pidfile"] = args.pause_pidfile
        words = [str(word) for pair in common.items() for word in pair]
        return [*self.prefix, *engine.command, *words, *engine.arguments, *placed.arguments]

    def _call(self, command: list[str], engine: EngineSetup, log: Path) -> int:
        environment = {**os.environ, **engine.environment}
        with log.open("w") as file:
            try:
                return subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    env=environment,
                    timeout=self.args.timeout,
                ).returncode
            except (OSError, subprocess.TimeoutExpired) as error:
                print(error, file=file)
                return -1

    def _collect(
        self, engine: EngineSetup, model: Model, index: int, found: dict[str, Any]
    ) -> None:
        """The rows of a result file, as samples."""
        self.results.versions[engine.key] = str(found["version"])
        facts = {name: found.get(name) for name in ("peak_rss_mib", "load_s", "kv_bytes")}
        self.results.facts[f"{engine.key} {model.name}"] = facts
        for regime, (_, column) in REGIMES.items():
            for row in (found.get(regime) or {}).get("rows", []):
                others = row["other_cpus"] + row["steal_cpus"]
                self.results.samples.append(
                    Sample(engine.key, model.name, regime, index, row[column], others)
                )

    def _measure_roofline(self, index: int) -> None:
        out = self.folder / f"roofline.{index}.json"
        words = ["-m", "benchmarks.cpu.roofline", "--threads", str(self.args.threads)]
        command = [*self.prefix, sys.executable, *words, "--out", str(out.resolve())]
        # A module is found from the repository's root only.
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=HERE.parents[1])
        self.results.rooflines.append(json.loads(out.read_text()))
        self._save()

    def _write_workload(self) -> None:
        lengths = request_lengths(WorkloadSpec(num_prompts=NUM_REQUESTS))
        requests = [
            {"id": index, "prompt_len": prompt, "output_len": output}
            for index, (prompt, output) in enumerate(lengths)
        ]
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "workload.json").write_text(json.dumps({"requests": requests}))

    def _save(self) -> None:
        text = json.dumps(asdict(self.results), indent=1)
        self.args.out.write_text(text + "\n")


# ---- the command line -----------------------------------------------------------------------


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--setup", type=Path, required=True, help="models and engines; see cpu_setup.py")
    add("--out", type=Path, required=True, help="all samples, as JSON")
    add("--append", action="store_true", help="keep what --out has already")
    add("--markdown", type=Path, help="the table")
    add("--folder", type=Path, help="raw results and logs; default: beside --out")
    add("--rounds", type=int, default=3)
    add("--reps", type=int, default=2, help="repetitions within each process")
    add("--retries", type=int, default=2, help="further rounds for what was loud")
    add("--parts", type=listed_words, default=list(PARTS), help=f"of {','.join(PARTS)}")
    add("--models", type=listed_words, default=[], help="only these")
    add("--engines", type=listed_words, default=[], help='only these, such as "quire,vLLM"')
    add("--precisions", type=listed_words, default=["bf16", "int8", "int4", "Q8_0", "Q4_K_M"])
    add("--quire-arguments", type=shlex.split, default=[], help="for quire's driver")
    add("--threads", type=int, default=2)
    add("--quiet-wait", type=float, default=8.0)
    add("--pause-pidfile", default="", help="passed to the drivers")
    add("--prefix", type=shlex.split, default=[], help="words before every command")
    add("--timeout", type=float, default=1800.0, help="seconds for one process")
    args = parser.parse_args(argv)
    check_arguments(parser, args, {"rounds": 0, "reps": 1, "retries": 0, "threads": 1}, PARTS)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        setup = read_setup(args.setup, tuple(args.quire_arguments))
        chosen = choose(setup, args.models, args.engines, args.precisions)
    except SetupError as error:
        sys.exit(f"cpu.py: error: {error}")
    results = Results.read(args.out) if args.append and args.out.exists() else Results()
    folder = args.folder or args.out.with_suffix(".raw")
    Bench(chosen, args, folder, results, args.prefix).run()
    report = make_report(results, setup.models)
    print(report)
    if args.markdown:
        args.markdown.write_text(report + "\n")


if __name__ == "__main__":
    main()
