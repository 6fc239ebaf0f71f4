"""The cost of a busy neighbour: decoding alone, and beside an endless loop on one processor.

    python -m benchmarks.cpu.neighbour --rounds 4 --out neighbour.json
    python -m benchmarks.cpu.neighbour --setup peers.toml --model llama-160m --precision bf16

The loop is pinned, to another processor every round, and the system gives it half of that one: on
two processors an engine that loses no more than this keeps three quarters of its speed. The
contenders are quire on the kernels named by --kernels, on the model in a folder (the embedded one
where none is named) and, with --setup, the peers of `peer_setup.py`'s file. Each is a process
of its own; alone and beside the loop alternate. One stream, end tokens ignored, tokens per second
after the first.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.cpu.peer_setup import OURS, PARTS, EngineSetup, choose, read_setup
from benchmarks.cpu.tables import number, table
from quire.bench.machine import NoiseMeter
from quire.kernels.cpu.library import load_library

NUM_PROMPT_TOKENS = 64
FIRST_TOKEN_ID = 300  # below the vocabulary size of the embedded model, above its special tokens
LOOP = """import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
print(flush=True)
while True: pass"""
LIMIT_S = 6.0  # for a figure, so that who falls deep is measured on fewer tokens
START_S = 0.3  # until the time of the loop's predecessor is forgotten


@dataclass(slots=True)
class Speeds:
    """Tokens per second of one contender, by round; other_cores: what others took when it was
    alone, at most."""

    contender: str
    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    other_cores: float = 0.0

    def row(self) -> list[str]:
        """The row of the table."""
        alone, beside = statistics.median(self.alone), statistics.median(self.beside)
        spread = f"{number(min(self.beside))} to {number(max(self.beside))}"
        kept = f"{100 * beside / alone:.0f}%"
        return [self.contender, number(alone), number(beside), spread, kept]


HEADER = ("contender", "alone, tok/s", "beside a busy loop", "rounds", "kept")


@contextmanager
def busy_processor(processor: int) -> Iterator[None]:
    """A process that takes all it gets of one processor; ended afterwards, by its own id."""
    words = [sys.executable, "-c", LOOP, str(processor)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as loop:
        try:
            assert loop.stdout is not None
            loop.stdout.readline()  # it is under way
            time.sleep(START_S)
            yield
        finally:
            loop.kill()


def alternate(contender: str, measure: Callable[[], float], num_rounds: int) -> Speeds:
    """Measure alone and beside the loop in turns. measure: tokens per second."""
    speeds = Speeds(contender)
    processors = sorted(os.sched_getaffinity(0))
    for index in range(num_rounds):
        meter = NoiseMeter()
        speeds.alone.append(measure())
        speeds.other_cores = max(speeds.other_cores, meter.stop().other_cores or 0.0)
        with busy_processor(processors[index % len(processors)]):
            speeds.beside.append(measure())
    return speeds


# ---- quire ----------------------------------------------------------------------------------


def measure_quire(args: argparse.Namespace) -> Speeds:
    """In this process, on the kernels that `args.only` names."""
    from quire import LLM, SamplingParams  # only this process needs it

    llm = LLM(
        args.model,
        kernels=args.only,
        num_threads=args.threads,
        dtype=args.dtype,
        quantization=args.quantization,
        max_num_seqs=2,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
    )
    prompt = list(range(FIRST_TOKEN_ID, FIRST_TOKEN_ID + NUM_PROMPT_TOKENS))
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)

    def measure() -> float:
        with llm.start({"prompt_token_ids": prompt}, params) as generation:
            while not generation.output.token_ids:
                generation.step()
            first_s = now_s = time.perf_counter()
            num_first = len(generation.output.token_ids)
            while len(generation.output.token_ids) < args.tokens and now_s < first_s + LIMIT_S:
                generation.step()
                now_s = time.perf_counter()
            return (len(generation.output.token_ids) - num_first) / (now_s - first_s)

    measure()  # warms up
    return alternate(f"{OURS}, kernels={args.only}", measure, args.rounds)


def run_quire(kernels: str, words: Sequence[str]) -> Speeds:
    """`measure_quire` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.cpu.neighbour", *words, "--only", kernels]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Speeds(**json.loads(done.stdout))


# ---- peers ----------------------------------------------------------------------------------


def run_peer(engine: EngineSetup, args: argparse.Namespace, folder: Path) -> Speeds:
    """The driver's one-stream part, anew for each figure."""
    workload, out = folder / "workload.json", folder / "result.json"
    workload.write_text('{"requests": []}')
    placed = engine.models[args.model]
    common = {"--model": placed.path, "--workload": workload, "--out": out, "--reps": 2}
    common |= {"--threads": args.threads or len(os.sched_getaffinity(0))}
    common |= {"--skip": ",".join(part for part in PARTS if part != "decode1")}
    words = [str(word) for option in common.items() for word in option]
    command = [*engine.command, *words, *placed.arguments, *engine.arguments]
    environment = {**os.environ, **engine.environment}

    def measure() -> float:
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        rows = json.loads(out.read_text())["decode1"]["rows"]
        return statistics.median(float(row["decode_tok_s"]) for row in rows)

    return alternate(engine.key, measure, args.rounds)


# ---- the command line -----------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    """All options; --only is what a child process is told."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", help="a folder (the embedded model); with --setup a name of its [[model]]")
    add("--dtype", default="auto")
    add("--quantization", help="of quire's weights")
    add("--kernels", help="comma list: quire's contenders (the best native ones, and torch)")
    add("--threads", type=int, help="of every contender (one for each processor)")
    add("--tokens", type=int, default=128, help="generated for a figure (%(default)s)")
    add("--rounds", type=int, default=4, help="(%(default)s)")
    add("--setup", type=Path, help="peers, in the form of cpu_setup.py")
    add("--engines", help="comma list: the peers to run (all)")
    add("--precision", default="bf16", help="of the peers to run (%(default)s)")
    add("--out", type=Path, help="all figures, as JSON")
    add("--only", help=argparse.SUPPRESS)
    return parser


def run_all(args: argparse.Namespace, words: Sequence[str]) -> list[Speeds]:
    """quire on all kernels that are asked for, and the set-up's peers."""
    peers: tuple[EngineSetup, ...] = ()
    if args.setup is not None:
        engines = [OURS, *args.engines.split(",")] if args.engines else []
        setup = choose(read_setup(args.setup), [args.model], engines, [args.precision])
        words = [*words, "--model", str(setup.models[0].folder)]
        peers = tuple(one for one in setup.engines if one.name != OURS and args.model in one.models)
    names = args.kernels or f"{next(iter(load_library().isas()))},torch"
    found = [run_quire(kernels, words) for kernels in names.split(",")]
    with TemporaryDirectory() as folder:
        found += [run_peer(peer, args, Path(folder)) for peer in peers]
    return found


def main(words: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if words is None else words
    args = make_parser().parse_args(words)
    if args.only is not None:
        print(json.dumps(asdict(measure_quire(args))))
        return
    found = run_all(args, words)
    if args.out is not None:
        args.out.write_text(json.dumps([asdict(speeds) for speeds in found], indent=1) + "\n")
    print(table(list(HEADER), [speeds.row() for speeds in found]))
    others = max(speeds.other_cores for speeds in found)
    print(f"\nother processes took up to {others:.2f} cores while a contender was alone")


if __name__ == "__main__":
    main()
