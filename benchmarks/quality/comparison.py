"""Quality beside speed: quire's formats and its peers' on one model with real weights.

    python -m benchmarks.quality.comparison --setup PEERS/peers.toml \\
        --model smollm2-135m-instruct --out quality.json --markdown quality.md

First the quality: transformers computes the distributions of fixed tokens in fp32, then each engine
reads the same tokens in a process of its own and compares its distributions with those
(`reading.py`). Then the speed, by `benchmarks/cpu.py`, whose samples lie beside --out. A figure
that a run does not measure is taken from the files of the last one with --append.
"""

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cpu import comparison as speed_comparison
from benchmarks.cpu.peer_setup import (
    FILES,
    EngineSetup,
    Model,
    Setup,
    SetupError,
    check_arguments,
    choose,
    listed_words,
    read_setup,
)
from benchmarks.cpu.tables import Results
from benchmarks.quality import heldout
from benchmarks.quality.tables import REFERENCE, find_rows, make_notes, make_report

HERE = Path(__file__).resolve().parent
PARTS = ("quality", "speed")
PRECISIONS = ("bf16", "int8", "int4", *FILES)
TIMEOUT_S = 900.0
FP32_BYTES = 4


def cut_windows(
    texts: Sequence[Sequence[int]], windows_per_text: int, window_tokens: int
) -> list[list[int]]:
    """The first whole windows of each text's token ids. Raises ValueError for a short text."""
    windows = []
    for index, tokens in enumerate(texts):
        if len(tokens) < windows_per_text * window_tokens:
            raise ValueError(
                f"text {index} has {len(tokens)} tokens, but {windows_per_text} windows of"
                f" {window_tokens} are asked; name a longer text, or lower --windows-per-text"
            )
        for start in range(0, windows_per_text * window_tokens, window_tokens):
            windows.append(list(tokens[start : start + window_tokens]))
    return windows


@dataclass(slots=True)
class QualityRun:
    """Runs the quality drivers; `facts` grows, and the file --out with it.

    folder: where windows, log-probabilities of the reference, results and logs go.
    """

    model: Model
    args: argparse.Namespace
    folder: Path
    facts: dict[str, Any] = field(default_factory=dict)

    def run(self, engines: Sequence[EngineSetup]) -> None:
        """The reference, then all engines that have a quality driver and the model."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write_windows()
        words = (sys.executable, str(HERE / "transformers_logits.py"), "--write-exact")
        reference = (*words, "--dtype", "float32")
        try:
            self._measure(REFERENCE, reference, str(self.model.folder), {})
            for engine in engines:
                placed = engine.models.get(self.model.name)
                if engine.quality and placed and self._exact.exists():
                    self._measure(engine.key, engine.quality, placed.path, engine.environment)
        finally:
            self._exact.unlink(missing_ok=True)

    @property
    def _exact(self) -> Path:
        """600 MB of the usual windows at a vocabulary of 49,152."""
        return self.folder / "exact.npy"

    def _write_windows(self) -> None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self.model.folder / "tokenizer.json"))
        texts = {path.name: path.read_text() for path in self.args.text} or heldout.texts()
        encoded = [tokenizer.encode(text).ids for text in texts.values()]
        windows = cut_windows(encoded, self.args.windows_per_text, self.args.window_tokens)
        listed = json.dumps(windows)
        (self.folder / "windows.json").write_text(listed)
        tokens = self.args.window_tokens
        now = {
            "model": self.model.name,
            "texts": list(texts),
            "num_windows": len(windows),
            "window_tokens": tokens,
            "num_predicted": len(windows) * (tokens - tokens // 2),
            "sha256": hashlib.sha256(listed.encode()).hexdigest(),
        }
        if self.facts and any(self.facts.get(name) != value for name, value in now.items()):
            raise SetupError(f"{self.args.out} is of another model or text; leave out --append")
        self.facts = {"engines": {}, "failures": [], **self.facts, **now}

    def _measure(
        self, key: str, command: Sequence[str], model: str, environment: Mapping[str, str]
    ) -> None:
        out = self.folder / f"{key.replace(' ', '-')}.json"
        out.unlink(missing_ok=True)
        options = {
            "--model": model,
            "--windows": self.folder / "windows.json",
            "--exact": self._exact,
            "--out": out,
            "--label": key.rpartition(" ")[2],
            "--threads": self.args.threads,
        }
        words = [*command, *(str(word) for pair in options.items() for word in pair)]
        started_s = time.monotonic()
        with out.with_suffix(".log").open("w") as log:
            try:
                status = subprocess.run(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **environment},
                    timeout=TIMEOUT_S,
                ).returncode
            except (OSError, subprocess.TimeoutExpired) as error:
                print(error, file=log)
                status = -1
        print(f"quality of {key}: {time.monotonic() - started_s:.0f} s", file=sys.stderr)
        failures = [one for one in self.facts["failures"] if not one.startswith(f"{key}:")]
        if status == 0:
            self.facts["engines"][key] = json.loads(out.read_text())
        else:
            print(f"failed: {shlex.join(words)}", file=sys.stderr)
            failures.append(f"{key}: ended with {status}; see {out.with_suffix('.log')}")
        self.facts["failures"] = failures
        self.args.out.write_text(json.dumps(self.facts) + "\n")


def measure_speed(args: argparse.Namespace, setup: Setup, out: Path) -> None:
    """Measure the same engines in turns by `cpu.py`."""
    words = ["--setup", str(args.setup), "--out", str(out), "--threads", str(args.threads)]
    speed_args = speed_comparison.parse_args([*words, *args.speed_arguments])
    results = Results.read(out) if args.append and out.exists() else Results()
    speed_comparison.Bench(setup, speed_args, out.with_suffix(".raw"), results).run()


# ---- the command line -----------------------------------------------------------------------


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--setup", type=Path, required=True, help="models and engines; see cpu/peer_setup.py")
    add("--model", required=True, help="the name of one [[model]]")
    add("--out", type=Path, required=True, help="quality of all engines, as JSON")
    add("--append", action="store_true", help="keep what the files have already")
    add("--markdown", type=Path, help="the tables")
    add("--parts", type=listed_words, default=list(PARTS), help=f"of {','.join(PARTS)}")
    add("--engines", type=listed_words, default=[], help='only these, such as "quire,OpenVINO"')
    add("--precisions", type=listed_words, default=list(PRECISIONS))
    add("--quire-arguments", type=shlex.split, default=[], help="for quire's drivers")
    add("--text", type=Path, nargs="+", default=[], help="UTF-8 texts; default: held-out ones")
    add("--windows-per-text", type=int, default=2)
    add("--window-tokens", type=int, default=1024)
    add("--threads", type=int, default=2)
    add("--speed-arguments", type=shlex.split, default=[], help='for cpu.py, as "--rounds 2"')
    args = parser.parse_args(argv)
    check_arguments(parser, args, {"windows_per_text": 1, "window_tokens": 4, "threads": 1}, PARTS)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    speed_out = args.out.with_suffix(".speed.json")
    try:
        setup = read_setup(args.setup, tuple(args.quire_arguments))
        chosen = choose(setup, [args.model], args.engines, args.precisions)
        facts = json.loads(args.out.read_text()) if args.append and args.out.exists() else {}
        run = QualityRun(chosen.models[0], args, args.out.with_suffix(".raw"), facts)
        if "quality" in args.parts:
            run.run(chosen.engines)
    except (SetupError, ValueError, OSError) as error:
        sys.exit(f"comparison.py: error: {error}")
    if "speed" in args.parts:
        measure_speed(args, chosen, speed_out)
    if REFERENCE not in run.facts.get("engines", {}):
        sys.exit(f"comparison.py: error: no quality was measured; see {run.folder}")
    is_known = speed_out.exists() and (args.append or "speed" in args.parts)
    speed = Results.read(speed_out) if is_known else Results()
    num_parameters = run.facts["engines"][REFERENCE]["weight_bytes"] // FP32_BYTES
    rows = find_rows(run.facts["engines"], speed, args.model, num_parameters)
    report = f"{make_report(rows)}\n\n{make_notes(run.facts)}"
    print(report)
    if args.markdown:
        args.markdown.write_text(report + "\n")


if __name__ == "__main__":
    main()
