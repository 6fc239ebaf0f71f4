"""Decoding over long contexts: what is measured, of any engine, and the result file.

    DRIVER --model FOLDER --out result.json --cases 1x32768,16x8192 [--steps 16] [--reps 3]

A case such as 16x8192 is 16 sequences with 8,192 tokens of context each. Only decode steps are
timed: `reps` times `steps` of them, in which every sequence gets one token a step. A repetition's
row has tokens per second and how many cores others took; a case has the memory that the process has
then (`rss`), of which K and V are known. Knows no engine."""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import driver

from quire.bench.machine import NoiseMeter

NUM_WARM_UP_STEPS = 3
_STATM = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class Case:
    """num_seqs sequences with `context` tokens before the first that is timed."""

    num_seqs: int
    context: int

    def __str__(self) -> str:
        return f"{self.num_seqs}x{self.context}"


class DecodingEngine(Protocol):
    """An engine that can be brought into the middle of a case."""

    name: str
    version: str

    def start(self, case: Case, num_steps: int) -> None:
        """Fill the contexts, with room for num_steps steps after them."""
        ...

    def step(self) -> int:
        """One decode step; the number of tokens that it brought."""
        ...

    def end(self) -> None:
        """Forget the case."""
        ...


@dataclass(slots=True)
class CaseResult:
    """rows: tok_s, other_cpus, steal_cpus of each repetition. Memory in bytes; None: not known."""

    case: str
    num_seqs: int
    context: int
    rows: list[dict[str, float]] = field(default_factory=list)
    rss_bytes: int | None = None
    tok_s: float = 0.0


def make_parser(description: str) -> argparse.ArgumentParser:
    """The options that all of these drivers have."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--model", required=True, help="the model, in the engine's form")
    add("--out", required=True, type=Path)
    add("--label", default="")
    add("--cases", type=parse_cases, default=parse_cases("1x32768,16x8192"))
    add("--steps", type=int, default=16)
    add("--reps", type=int, default=3)
    add("--threads", type=int, default=2)
    add("--dtype", default="bfloat16")
    return parser


def parse_cases(text: str) -> list[Case]:
    """ "1x32768,16x8192" -> cases. Raises ValueError, which argparse reports."""
    cases = []
    for word in text.split(","):
        num_seqs, _, context = word.partition("x")
        case = Case(int(num_seqs), int(context))
        if case.num_seqs < 1 or case.context < 1:
            raise ValueError(f"{word} has no sequence or no context")
        cases.append(case)
    return cases


def most_tokens(args: argparse.Namespace) -> int:
    """How many positions the longest case comes to, with a margin for engines that overshoot."""
    steps = NUM_WARM_UP_STEPS + args.steps * args.reps
    return int(max(case.context for case in args.cases) + steps + 256)


@contextmanager
def raised_model(folder: str, num_positions: int) -> Iterator[Path]:
    """The model in a temporary folder, with a config that allows at least num_positions."""
    source = Path(folder)
    with TemporaryDirectory(prefix="long-context-") as name:
        target = Path(name)
        for path in source.iterdir():
            (target / path.name).symlink_to(path.resolve())
        config = json.loads((source / "config.json").read_text())
        known = config["max_position_embeddings"]
        config["max_position_embeddings"] = max(known, num_positions)
        (target / "config.json").unlink()
        (target / "config.json").write_text(json.dumps(config))
        tokenizer = target / "tokenizer_config.json"
        if tokenizer.exists():  # it may limit the length, too
            raw = json.loads(tokenizer.read_text())
            raw.pop("model_max_length", None)
            tokenizer.unlink()
            tokenizer.write_text(json.dumps(raw))
        yield target


def measure(engine: DecodingEngine, args: argparse.Namespace) -> None:
    """All cases; the file is whole after each."""
    results: list[CaseResult] = []
    for case in args.cases:
        engine.start(case, NUM_WARM_UP_STEPS + args.steps * args.reps)
        for _ in range(NUM_WARM_UP_STEPS):
            engine.step()
        result = CaseResult(str(case), case.num_seqs, case.context)
        for _ in range(args.reps):
            result.rows.append(_repetition(engine, case, args.steps))
        result.tok_s = statistics.median(row["tok_s"] for row in result.rows)
        result.rss_bytes = rss_bytes()
        engine.end()
        results.append(result)
        save(args, engine.name, engine.version, results)


def _repetition(engine: DecodingEngine, case: Case, num_steps: int) -> dict[str, float]:
    meter, started_s = NoiseMeter(), time.perf_counter()
    num_tokens = sum(engine.step() for _ in range(num_steps))
    elapsed_s = time.perf_counter() - started_s
    noise = meter.stop()
    assert num_tokens == case.num_seqs * num_steps, (num_tokens, str(case), num_steps)
    return {
        "tok_s": num_tokens / elapsed_s,
        "other_cpus": noise.other_cores or 0.0,
        "steal_cpus": noise.steal_cores or 0.0,
    }


def rss_bytes() -> int:
    """Resident memory of this process now."""
    return int(_STATM.read_text().split()[1]) * resource.getpagesize()


def save(args: argparse.Namespace, name: str, version: str, results: list[CaseResult]) -> None:
    """Write the result file."""
    found: dict[str, Any] = {
        "peer": name,
        "version": version,
        "label": args.label,
        "model": Path(args.model).name,
        "threads": args.threads,
        "cases": [asdict(result) for result in results],
    }
    args.out.write_text(json.dumps(found, indent=1) + "\n")


def draw_prompt(case: Case, index: int) -> list[int]:
    """The prompt of one of a case's sequences: random, all different."""
    return driver.draw_tokens(case.context, 904, case.num_seqs, case.context, index)
