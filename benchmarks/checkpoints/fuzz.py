"""Damaged and lying model folders: each is served or refused in a sentence, fast and small.

    python -m benchmarks.checkpoints.fuzz --cases 10000 --seed 0 --out fuzz_checkpoint.json
    python -m benchmarks.checkpoints.fuzz --cases 10000 --seed 0 --gguf

makes a model of two layers, changes what its files say (numbers beyond all bounds, other types,
names that are missing or there twice, offsets, shapes and lengths of the weights' header, bytes
that are cut, flipped or somebody else's), and loads and runs it in a process of its own. A case
fails if it raises anything but an error of quire, if the error is not one line, if the process is
killed, takes more than 2 s of processor time or grows by more than 200 MB (or twice its files'
bytes, where that is more), if what is served is not finite, or if a change of fields that should
not matter changes the tokens. Cases follow from the seed and their number alone, so `--first N
--cases 1` repeats one. Also used by the tests, with fewer cases.
"""

import argparse
import json
import math
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.checkpoints.damage import Case, Mutator, extremes
from benchmarks.checkpoints.gguf_damage import GGUFMutator, large_files
from benchmarks.checkpoints.sound_models import Files

MAX_CPU_S = 2.0
MAX_GROWTH_BYTES = 200 << 20
MAX_WALL_S = 60
"""A process that waits for ever takes no processor time; only that is found by this."""
MAX_MESSAGE_CHARACTERS = 1200


@dataclass(slots=True)
class Outcome:
    """kind: "served", "refused", or how it failed. text: tokens, the error, or the traceback."""

    kind: str
    text: str
    cpu_s: float = 0.0
    grown_bytes: int = 0

    @property
    def is_good(self) -> bool:
        return self.kind in ("served", "refused")


def serve(folder: Path, is_large: bool) -> list[int]:
    """Load the model and continue a text. is_large: with 64 rows and 64 MiB of KV cache, which a
    context of 131,072 tokens fits; the default would be a share of the machine's memory."""
    from quire import LLM, SamplingParams
    from quire.errors import CheckpointError

    sizes: dict[str, Any] = {"kv_cache_memory": 1 << 20, "max_num_seqs": 4}
    if is_large:
        sizes = {"kv_cache_memory": 64 << 20}
    llm = LLM(str(folder), num_threads=1, **sizes)
    wishes = [
        SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=6, logprobs=2, seed=1),  # the model's own options
    ]
    outputs = llm.generate(["abc ab"] * 2, wishes, use_tqdm=False)
    for output in outputs:
        if output.error is not None and _is_of_numbers(folder, output.error):
            raise CheckpointError(output.error)
        if output.error is not None:
            raise AssertionError(f"the step failed: {output.error}")
        entries = output.outputs[0].logprobs or ()
        logprobs = [found.logprob for entry in entries for found in entry.values()]
        if not all(map(math.isfinite, logprobs)):
            raise AssertionError(f"not finite: {logprobs}")
    return list(outputs[0].outputs[0].token_ids)


def _is_of_numbers(folder: Path, error: str) -> bool:
    """Whether a request ended because other bytes of a GGUF file were taken for its numbers, or in
    another way: a safetensors file's case changes none."""
    return "no usable logits" in error and any(folder.glob("*.gguf"))


def run_case(case: Case, folder: Path, job: Callable[[Path, bool], list[int]] = serve) -> Outcome:
    """In a process of its own, which is limited and measured. folder: where to write the files."""
    _write(case.files, folder)
    with tempfile.TemporaryFile() as answers:
        pid = os.fork()
        if pid == 0:
            _run_child(lambda: job(folder, case.number % 4 == 0), answers.fileno())
        _, status, usage = os.wait4(pid, 0)
        answers.seek(0)
        content = answers.read().decode(errors="replace")
    shutil.rmtree(folder)
    before, _, content = content.partition("\n")
    kind, _, text = content.partition("\n")
    grown_bytes = usage.ru_maxrss * 1024 - int(before)
    outcome = Outcome(kind, text.strip(), usage.ru_utime + usage.ru_stime, grown_bytes)
    num_bytes = sum(len(content or b"") for content in case.files.values())
    return _judged(outcome, status, max(MAX_GROWTH_BYTES, 2 * num_bytes))


def _judged(outcome: Outcome, status: int, max_growth_bytes: int) -> Outcome:
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        outcome.kind, outcome.text = "killed", f"{name} {outcome.kind} {outcome.text}"
    elif outcome.grown_bytes > max_growth_bytes:
        outcome.kind = f"grew ({outcome.kind})"
    elif outcome.cpu_s > MAX_CPU_S:
        outcome.kind = f"slow ({outcome.kind})"
    elif outcome.kind == "refused" and (
        len(outcome.text) > MAX_MESSAGE_CHARACTERS or not outcome.text.isprintable()
    ):
        outcome.kind = "unreadable"
    return outcome


def _run_child(job: Callable[[], list[int]], answers: int) -> None:
    """Never returns."""
    import traceback

    from quire.errors import QuireError

    # The resident memory is now that of Python and torch. Pages of libraries that are read from now
    # on count as growth (some 50 MB).
    os.write(answers, b"%d\n" % _resident_bytes())
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(MAX_WALL_S)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(MAX_CPU_S) + 1, -1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    try:
        text = f"served\n{job()}"
    except QuireError as error:
        text = f"refused\n{error}"
    except BaseException:  # whatever it is: for the report
        text = f"traceback\n{traceback.format_exc()}"
    os.write(answers, text.encode(errors="backslashreplace"))
    os._exit(0)


def _write(files: Files, folder: Path) -> None:
    folder.mkdir()
    for name, content in files.items():
        if content is None:
            os.mkfifo(folder / name)
        else:
            (folder / name).write_bytes(content)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@dataclass(slots=True)
class Fuzzed:
    """kinds: how many cases ended so. failures: what to repeat, and what came of it."""

    kinds: Counter[str] = field(default_factory=Counter)
    max_cpu_s: float = 0.0
    max_grown_bytes: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    messages: Counter[str] = field(default_factory=Counter)


def fuzz(
    num_cases: int,
    seed: int = 0,
    first: int = 0,
    *,
    with_extremes: bool = True,
    is_gguf: bool = False,
    job: Callable[[Path, bool], list[int]] = serve,
) -> Fuzzed:
    """Cases first .. first + num_cases - 1 of a seed, after the sound folders themselves.

    is_gguf: they are GGUF files, in place of safetensors folders.
    """
    fuzzed, mutator = Fuzzed(), (GGUFMutator if is_gguf else Mutator)(seed)
    with tempfile.TemporaryDirectory(prefix="fuzz-checkpoint-") as parent:
        folder = Path(parent) / "model"
        expected: dict[str, str] = {}
        for name, files in mutator.sound.items():
            outcome = run_case(Case(1, [name], files, name), folder, job)
            expected[name] = outcome.text
            _note(fuzzed, Case(1, [name], files, name), outcome, must_be_served=True)
        cases = (mutator.draw(number) for number in range(first, first + num_cases))
        special = (large_files if is_gguf else extremes)() if with_extremes else ()
        for case in chain(special, cases):
            outcome = run_case(case, folder, job)
            if outcome.kind.startswith("slow"):  # or other processes slowed the processor down
                outcome = run_case(case, folder, job)
            if case.is_same and outcome.kind == "served" and outcome.text != expected[case.sound]:
                outcome.kind = "other tokens"
            _note(fuzzed, case, outcome)
    return fuzzed


def _note(fuzzed: Fuzzed, case: Case, outcome: Outcome, must_be_served: bool = False) -> None:
    fuzzed.kinds[outcome.kind] += 1
    fuzzed.max_cpu_s = max(fuzzed.max_cpu_s, outcome.cpu_s)
    fuzzed.max_grown_bytes = max(fuzzed.max_grown_bytes, outcome.grown_bytes)
    if outcome.kind == "refused":
        fuzzed.messages[outcome.text] += 1
    if not outcome.is_good or (must_be_served and outcome.kind != "served"):
        fuzzed.failures.append({"number": case.number, "what": case.what} | asdict(outcome))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--cases", type=int, default=10_000)
    add("--first", type=int, default=0, help="number of the first case")
    add("--seed", type=int, default=0)
    add("--gguf", action="store_true", help="of GGUF files, in place of safetensors folders")
    add("--out", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    import quire.offline.llm  # noqa: F401 - once, and not in every process

    args = parse_args(argv)
    start_s = time.monotonic()
    with_extremes = args.first == 0
    fuzzed = fuzz(args.cases, args.seed, args.first, with_extremes=with_extremes, is_gguf=args.gguf)
    for failure in fuzzed.failures:
        print(json.dumps(failure)[:3000])
    if args.out:
        found = {one.name: getattr(fuzzed, one.name) for one in fields(fuzzed)}
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    for kind, count in fuzzed.kinds.most_common():
        print(f"{count:6}  {kind}")
    print(
        f"{fuzzed.kinds.total()} cases in {time.monotonic() - start_s:.0f} s; at most"
        f" {fuzzed.max_cpu_s:.2f} s and {fuzzed.max_grown_bytes / 2**20:.0f} MiB each;"
        f" {len(fuzzed.messages)} different messages; {len(fuzzed.failures)} failures"
    )
    sys.exit(1 if fuzzed.failures else 0)


if __name__ == "__main__":
    main()
