"""Long contexts of models with windows or states: speed and memory beside floors and llama.cpp.

    python -m benchmarks.cpu.unlike_layers --model FOLDER --loads 1x32768,16x8192 \\
        --peer-gguf FILE.gguf --llama-batched-bench BUILD/bin/llama-batched-bench

A load such as 16x8192 is 16 sequences with different random prompts of 8,192 tokens each. They are
all given at once; when each has its first token, decode steps are timed, in turns with plain reads
of a large array. Every load and engine is a process of its own, whose peak of resident memory is
known.

    decode floor    weights of a step, keys and values that its layers see (of a window: no more
                    than that), and states twice (read and written), over the bandwidth read before
                    and after the turn; or operations as of prompts, where they take longer
    prompt floor    operations of linears and attention, over the rate of torch's products of bf16;
                    those of recurrences are not counted
    memory floor    the weights, and of each sequence what its layers can still see

llama.cpp has caches of f16 with the same bytes. It computes one prompt for all sequences and copies
its keys and values, except where a model has states: its tool spoils those that it copies.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.cpu.experts import Turn, in_turns
from benchmarks.cpu.roofline import best_s
from benchmarks.cpu.tables import NONE, number, table
from quire import LLM, SamplingParams
from quire.bench.machine import NoiseMeter, processor
from quire.core.memory.memory_report import HELD_PARTS
from quire.formats.dense import DenseMethod
from quire.kernels.cpu.library import load_library
from quire.layers.sharded import LinearMethods
from quire.models.config import DecoderConfig
from quire.models.footprint import footprint
from quire.models.registry import load_config
from quire.offline.branch_handle import BranchHandle

SEED = 904
LOW_TOKEN_ID = 3
MAX_STEP_TOKENS = 2048
SPARE_TOKENS = 16
ITEM_BYTES = 2  # bf16, and llama.cpp's f16
RATE_SIZE = 4096
KIB, MIB = 2**10, 2**20
NUM_TURNS = 8
LEAST_STEPS = 4
TITLES = {
    "prompt_tok_s": "prompts, tokens/s",
    "decode_tok_s": "decode, tokens/s",
    "held_bytes": "K, V and states held, MiB",
    "peak_bytes": "peak resident, MiB",
}


@dataclass(frozen=True, slots=True)
class Load:
    """num_seqs sequences with prompts of prompt_len tokens."""

    num_seqs: int
    prompt_len: int

    @classmethod
    def parse(cls, text: str) -> "Load":
        num_seqs, _, prompt_len = text.partition("x")
        load = cls(int(num_seqs), int(prompt_len))
        if min(load.num_seqs, load.prompt_len) < 1:
            raise ValueError(f"{text} has no sequence or no prompt")
        return load

    def __str__(self) -> str:
        return f"{self.num_seqs} x {self.prompt_len:,}"

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.prompt_len


@dataclass(frozen=True, slots=True)
class Needs:
    """The least bytes and operations of a model's steps.

    weight_bytes: of all that is stored. step_weight_bytes: that a decode step reads.
    layers: of each attention layer, bytes of a token's K and V, operations for each pair of query
        and key, and window. state_bytes: of a sequence, in all layers.
    """

    weight_bytes: int
    step_weight_bytes: int
    linear_ops: int
    layers: tuple[tuple[int, int, int | None], ...]
    state_bytes: int

    @classmethod
    def of(cls, config: DecoderConfig) -> "Needs":
        """The needs of a model in bf16 without experts."""
        found = footprint(config, torch.bfloat16, LinearMethods(DenseMethod()))
        head_bytes = config.vocab_size * config.hidden_size * ITEM_BYTES
        return cls(
            weight_bytes=found.weight_bytes,
            step_weight_bytes=found.token_bytes,
            # Only the last token of a prompt has logits. Each weight takes two operations.
            linear_ops=2 * (found.token_bytes - head_bytes) // ITEM_BYTES,
            layers=tuple(
                (
                    2 * spec.num_kv_heads * spec.head_dim * ITEM_BYTES,
                    4 * spec.num_heads * spec.head_dim,
                    spec.window,
                )
                for spec in config.attention_specs
            ),
            state_bytes=sum(spec.num_units * spec.unit_bytes for spec in config.recurrent_specs),
        )

    def kv_bytes(self, context: int) -> int:
        """That a sequence's next token sees."""
        return sum(size * min(context, window or context) for size, _, window in self.layers)

    def step_bytes(self, contexts: Sequence[int]) -> int:
        """That a decode step of these sequences reads and writes."""
        kv_bytes = sum(map(self.kv_bytes, contexts))
        return self.step_weight_bytes + kv_bytes + 2 * len(contexts) * self.state_bytes

    def step_ops(self, contexts: Sequence[int]) -> int:
        """Operations of linears, head and attention in a decode step of these sequences."""
        num_weights = self.step_weight_bytes // ITEM_BYTES
        pairs = sum(
            pair_ops * min(context, window or context)
            for context in contexts
            for _, pair_ops, window in self.layers
        )
        return 2 * len(contexts) * num_weights + pairs

    def prompt_ops(self, prompt_len: int) -> int:
        """Operations of linears and attention of one prompt."""
        total = prompt_len * self.linear_ops
        for _, pair_ops, window in self.layers:
            seen = min(prompt_len, window or prompt_len)
            num_pairs = seen * (seen + 1) // 2 + (prompt_len - seen) * seen
            total += pair_ops * num_pairs
        return total


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one load in one engine. Only quire has the fields with a default.

    others: cores that other processes took meanwhile. held_bytes: that block tables hold when all
    prompts are computed, states included. decode_share: of what bytes alone
    would allow, the median over turns.
    """

    prompt_tok_s: float
    decode_tok_s: float
    peak_bytes: int
    others: float
    held_bytes: int | None = None
    decode_share: float | None = None
    prompt_ops_s: float | None = None
    read_bytes_s: float | None = None


def measure(folder: Path, load: Load, num_steps: int, threads: int) -> Figures:
    """One load of quire, in this process."""
    load_library()  # so that no other kernels compute it unnoticed
    config = read_config(folder)
    # While the last prompts are computed, the first sequences decode already.
    num_new = num_steps + load.num_tokens // MAX_STEP_TOKENS + load.num_seqs + SPARE_TOKENS
    llm = LLM(
        model=str(folder),
        dtype="bfloat16",
        max_model_len=load.prompt_len + num_new,
        max_num_seqs=load.num_seqs,
        max_num_batched_tokens=MAX_STEP_TOKENS,
        num_threads=threads,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
    prompts = draw_prompts(load, config.vocab_size)
    meter = NoiseMeter()
    with ExitStack() as stack:
        started_s = time.perf_counter()
        handles = [
            stack.enter_context(llm.start({"prompt_token_ids": prompt}, params))
            for prompt in prompts
        ]
        while not handles[-1].output.token_ids:
            handles[-1].step()
        prompts_s = time.perf_counter() - started_s
        report = llm.memory_report()
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
        turns = decode(handles, Needs.of(config), load, num_steps)
    noise = meter.stop()
    return Figures(
        prompt_tok_s=load.num_tokens / prompts_s,
        decode_tok_s=load.num_seqs / statistics.median(turn.took_s for turn in turns),
        peak_bytes=peak_bytes,
        others=noise.other_cores or 0.0,
        held_bytes=sum(report.parts[name] for name in HELD_PARTS),
        decode_share=statistics.median(turn.share for turn in turns),
        prompt_ops_s=product_ops_s(threads),
        read_bytes_s=statistics.median(turn.read_bytes_s for turn in turns),
    )


def decode(handles: Sequence[BranchHandle], needs: Needs, load: Load, num_steps: int) -> list[Turn]:
    """Steps of all sequences, in turns with reads; the last one has the fewest tokens."""
    contexts = [load.prompt_len + len(handle.output.token_ids) for handle in handles]

    def step() -> float:
        num_bytes = needs.step_bytes(contexts)
        handles[-1].step()
        contexts[:] = [context + 1 for context in contexts]
        return num_bytes

    steps_per_turn = max(1, num_steps // NUM_TURNS)
    return in_turns(step, (num_steps - 1) // steps_per_turn, steps_per_turn)


def draw_prompts(load: Load, vocab_size: int) -> list[list[int]]:
    """Random, the same in every run."""
    generator = np.random.default_rng(SEED)
    shape = (load.num_seqs, load.prompt_len)
    prompts: list[list[int]] = generator.integers(LOW_TOKEN_ID, vocab_size, shape).tolist()
    return prompts


def product_ops_s(threads: int) -> float:
    """Operations per second of a large product in bf16; the engine holds torch to one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    left, right = (torch.randn(RATE_SIZE, RATE_SIZE).bfloat16() for _ in range(2))
    rate = 2 * RATE_SIZE**3 / best_s(partial(torch.mm, left, right.t()))
    torch.set_num_threads(before)
    return rate


def read_config(folder: Path) -> DecoderConfig:
    """The config of a decoder without experts. Other models are refused, since their steps can't be
    counted here."""
    config = load_config(folder)
    if not isinstance(config, DecoderConfig) or any(config.mixtures or ()):
        sys.exit(f"{folder}: --model must be a decoder of quire's own, without experts")
    return config


def run_quire(args: argparse.Namespace, load: Load) -> Figures:
    """In a process of its own."""
    words = [sys.executable, "-m", "benchmarks.cpu.unlike_layers", "--model", str(args.model)]
    words += ["--loads", f"{load.num_seqs}x{load.prompt_len}", "--steps", str(args.steps)]
    out, _, _ = _run([*words, "--threads", str(args.threads), "--here"])
    return Figures(**json.loads(out.splitlines()[-1]))


def run_llama(args: argparse.Namespace, load: Load, has_states: bool) -> Figures:
    """llama.cpp's own tool, with a cache for each sequence."""
    words = [str(args.llama_batched_bench), "-m", str(args.peer_gguf)]
    words += ["-t", str(args.threads), "-tb", str(args.threads), "--output-format", "jsonl"]
    words += ["-npp", str(load.prompt_len), "-npl", str(load.num_seqs), "-ntg", str(args.steps)]
    words += ["-c", str(load.num_seqs * (load.prompt_len + args.steps + SPARE_TOKENS))]
    if load.num_seqs > 1 and not has_states:
        words.append("-pps")
    out, peak_bytes, others = _run(words)
    found = json.loads([line for line in out.splitlines() if line.startswith("{")][-1])
    return Figures(found["speed_pp"], found["speed_tg"], peak_bytes, others)


def _run(words: Sequence[str]) -> tuple[str, int, float]:
    """The output of a command, its peak of resident memory in bytes, and the cores of others."""
    meter = NoiseMeter()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    out = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{words[0]} ended with {process.returncode}: {' '.join(words)}")
    return out, usage.ru_maxrss * KIB, meter.stop().other_cores or 0.0


def make_report(needs: Needs, found: Sequence[tuple[Load, Figures, Figures | None]]) -> str:
    """A table; a floor of memory is the least, one of speed the most."""
    header = ["load", "quire", "floor", "quire / floor", "llama.cpp", "quire / llama.cpp"]
    rows = []
    # A floor must not be beaten, and noise only lowers the rate.
    ops_s = max(ours.prompt_ops_s or 0.0 for _, ours, _ in found)
    for load, ours, peer in found:
        assert ours.decode_share and ours.held_bytes and ops_s
        kept_bytes = load.num_seqs * (needs.kv_bytes(load.prompt_len) + needs.state_bytes)
        step_ops = needs.step_ops([load.prompt_len] * load.num_seqs)
        ops_bound = load.num_seqs * ops_s / step_ops
        floors = {
            "prompt_tok_s": load.prompt_len * ops_s / needs.prompt_ops(load.prompt_len),
            "decode_tok_s": min(ours.decode_tok_s / ours.decode_share, ops_bound),
            "held_bytes": kept_bytes,
            "peak_bytes": needs.weight_bytes + kept_bytes,
        }
        for name, floor in floors.items():
            own, other = getattr(ours, name), getattr(peer, name, None)
            unit = MIB if name.endswith("bytes") else 1
            cells = [f"{load}: {TITLES[name]}", number(own / unit), number(floor / unit)]
            cells.append(f"{own / floor:.0%}")
            cells += [NONE, NONE] if other is None else [number(other / unit), f"{own / other:.2f}"]
            rows.append(cells)
    return table(header, rows)


def _note(load: Load, figures: Figures) -> str:
    """Under what the floors were computed."""
    assert figures.read_bytes_s and figures.prompt_ops_s
    return (
        f"{load}: {figures.read_bytes_s / 1e9:.1f} GB/s read,"
        f" {figures.prompt_ops_s / 1e9:.0f} G operations/s in bf16"
    )


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a folder; without experts")
    add("--loads", type=_loads, default="1x32768,16x8192", help="sequences x prompt tokens of each")
    add("--steps", type=int, default=48, help="that are timed; at least 4")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--peer-gguf", type=Path, help="the same weights in bf16 for llama.cpp")
    add("--llama-batched-bench", type=Path, help="llama.cpp's tool")
    add("--out", type=Path, help="all figures as JSON")
    add("--here", action="store_true", help="quire's figures of one load as JSON, nothing else")
    args = parser.parse_args(argv)
    if (args.peer_gguf is None) != (args.llama_batched_bench is None):
        parser.error("--peer-gguf and --llama-batched-bench go together; give both or none")
    if args.steps < LEAST_STEPS or args.threads < 1:
        parser.error(f"--steps must be at least {LEAST_STEPS} and --threads at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.here:
        print(json.dumps(asdict(measure(args.model, args.loads[0], args.steps, args.threads))))
        return 0
    needs = Needs.of(read_config(args.model))
    found: list[tuple[Load, Figures, Figures | None]] = []
    for load in args.loads:
        ours, peer = run_quire(args, load), None
        print(_note(load, ours), f"others took {ours.others:.2f} cores", sep="; ", file=sys.stderr)
        if args.peer_gguf is not None:
            peer = run_llama(args, load, needs.state_bytes > 0)
            print(f"llama.cpp: others took {peer.others:.2f} cores", file=sys.stderr)
        found.append((load, ours, peer))
        if args.out is not None:
            args.out.write_text(json.dumps([list(map(_plain, one)) for one in found], indent=1))
    print(f"{processor()}, {args.model.name}\n\n{make_report(needs, found)}\n")
    print("\n".join(_note(load, ours) for load, ours, _ in found))
    return 0


def _loads(text: str) -> list[Load]:
    return [Load.parse(word) for word in text.split(",")]


def _plain(what: Load | Figures | None) -> Any:
    return None if what is None else asdict(what)


if __name__ == "__main__":
    sys.exit(main())
