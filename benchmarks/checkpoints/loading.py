"""How long a model takes from the start of the process to its first token, and its peak memory.

    python -m benchmarks.checkpoints.loading --model FOLDER_OR_GGUF --dtype bfloat16 \\
        [--quantization int8] [--rounds 3] [--warm-memory]

Each round is a new process that loads the model and continues a short prompt by one token. Before
it the weights' files are read into memory, which is timed, too: loading is to take at most 1.2
times as long.
The files come from the page cache, or, with `--cold`, are dropped from it before they are read and
before they are loaded. With `--warm-memory` the process takes as much memory as the files have, and
gives it back, before its model is loaded: a virtual machine returns pages that nobody uses to its
host, which takes 0.3 to 2 s a GiB to give them again (Zen 5, free page reporting), whoever asks.
The bound on peak memory (resident pages, files' included) is weights as stored + KV cache + 600
MiB: the interpreter, torch and the model's tokenizer take most of the latter. A folder needs no
tokenizer; `random_weights.py` fills one that has only a config.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROMPT = "def quicksort(values):\n    if len(values) < 2:\n        return values\n"
ALLOWANCE_BYTES = 600 << 20
MIB = 1 << 20
MOST_READING_TIMES = 1.2
TOKEN_IDS = list(range(3, 35))
"""The prompt where there is no tokenizer."""

PHASES = ("imports", "tokenizer", "config", "weights", "kv_cache", "rest", "first_token")


def child(options: dict[str, Any], started_s: float) -> dict[str, Any]:
    """Load and generate. started_s: of the process, by the monotonic clock. Returns seconds by
    phase, and bytes."""
    from quire import LLM, SamplingParams  # what it takes to import is one of the phases
    from quire.assembly import model_kind
    from quire.assembly import rank_build as share
    from quire.text.tokenizer import Tokenizer

    seconds = {"imports": time.monotonic() - started_s}
    made: dict[str, Any] = {}

    def time_phase(phase: str, owner: object, name: str) -> None:
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun_s = time.monotonic()
            made[phase] = function(*args, **kwargs)
            seconds[phase] = time.monotonic() - begun_s
            return made[phase]

        setattr(owner, name, timed)

    time_phase("tokenizer", Tokenizer, "from_folder")
    time_phase("config", model_kind, "load_config")
    time_phase("weights", share, "load_model")
    time_phase("kv_cache", share, "KVCache")
    if options.pop("warm_memory", False):
        warm_memory(Path(options["model"]))
    has_tokenizer = (Path(options["model"]) / "tokenizer.json").is_file()
    begun_s = time.monotonic()
    llm = LLM(**options, skip_tokenizer_init=not has_tokenizer)
    built_s = time.monotonic()
    seconds["rest"] = built_s - begun_s - sum(seconds[phase] for phase in made)
    prompt = PROMPT if has_tokenizer else {"prompt_token_ids": TOKEN_IDS}
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=has_tokenizer)
    output = llm.generate([prompt], params, use_tqdm=False)
    assert len(output[0].outputs[0].token_ids) == 1
    seconds["first_token"] = time.monotonic() - built_s
    return {
        "seconds": seconds,
        "total_s": time.monotonic() - started_s,
        "weight_bytes": weight_bytes(made["weights"]),
        "kv_bytes": llm.memory_report().total_bytes,
        "peak_bytes": peak_bytes(),
    }


def warm_memory(model: Path) -> None:
    """Take as much memory as the files have, write to it, and give it back."""
    from quire.kernels.cpu.memory import allocate

    allocate(sum(path.stat().st_size for path in weight_files(model))).fill_(1)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # it was no peak


def weight_bytes(model: Any) -> int:
    """The bytes of all parameters, as they are stored."""
    from quire.models.checkpoints.loader import module_bytes  # not before the imports are timed

    dtype = next(model.parameters()).dtype
    return sum(module_bytes(module, dtype) for module in model.modules())


def peak_bytes() -> int:
    """The most resident memory that this process ever had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """One round, in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.checkpoints.loading",
        "--child",
        json.dumps(options),
    ]
    done = subprocess.run(
        [*command, str(time.monotonic())], stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def weight_files(model: Path) -> list[Path]:
    """The weight files of a folder; a GGUF file is its own weight file."""
    return [model] if model.is_file() else sorted(model.glob("*.safetensors"))


def read(model: Path) -> float:
    """Read the weights into new memory, a file at a time: what every loader has to do at least.
    Returns the seconds."""
    begun_s = time.monotonic()
    for path in weight_files(model):
        path.read_bytes()
    return time.monotonic() - begun_s


def forget(model: Path) -> None:
    """Drop the weights from the page cache."""
    for path in weight_files(model):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_round(options: dict[str, Any], folder: Path, *, is_cold: bool) -> dict[str, Any]:
    """The time of reading, then the time of loading."""
    if is_cold:
        forget(folder)
    reading_s = read(folder)
    if is_cold:
        forget(folder)
    found = measure(options)
    return found | {"reading_s": reading_s}


def show(rounds: Sequence[dict[str, Any]]) -> None:
    """The table: medians over the rounds, with their range."""
    print(f"{'phase':<12} {'median s':>9}  range")
    for phase in (*PHASES, "total"):
        seconds = [
            found["total_s"] if phase == "total" else found["seconds"].get(phase, 0.0)
            for found in rounds
        ]
        low, high = min(seconds), max(seconds)
        print(f"{phase:<12} {statistics.median(seconds):>9.3f}  {low:.3f} to {high:.3f}")
    ratio = statistics.median(found["seconds"]["weights"] / found["reading_s"] for found in rounds)
    print(
        f"reading the files takes {statistics.median(f['reading_s'] for f in rounds):.3f} s, the"
        f" weights {ratio:.2f} times as long, at most {MOST_READING_TIMES}:"
        f" {'kept' if ratio <= MOST_READING_TIMES else 'EXCEEDED'}"
    )
    last = rounds[-1]
    bound = last["weight_bytes"] + last["kv_bytes"] + ALLOWANCE_BYTES
    peak = max(found["peak_bytes"] for found in rounds)
    print(
        f"weights {last['weight_bytes'] / MIB:.0f} MiB, KV cache {last['kv_bytes'] / MIB:.0f} MiB;"
        f" peak {peak / MIB:.0f} MiB, bound {bound / MIB:.0f} MiB:"
        f" {'kept' if peak <= bound else 'EXCEEDED'}"
    )


def main() -> int:
    """The command line of this file."""
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(json.loads(sys.argv[2]), float(sys.argv[3]))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a local folder")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-memory", default="256MiB")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="from the disk")
    parser.add_argument(
        "--warm-memory", action="store_true", help="that the process has used right before"
    )
    arguments = vars(parser.parse_args())
    num_rounds, is_cold = arguments.pop("rounds"), arguments.pop("cold")
    folder = arguments["model"]
    if not is_cold:
        read(folder)
    options = {name: value for name, value in arguments.items() if value is not None}
    options["model"] = str(folder)
    show([measure_round(options, folder, is_cold=is_cold) for _ in range(num_rounds)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
