"""Claims about long contexts: memory and time of decoding, and pages that lie anywhere.

A Llama with random weights is written to a temporary folder and served by a real engine. Its
prompts are beginnings of one text, so that each is computed once and then found in the prefix
cache. Blocks are handed out in random order: a sequence's pages lie anywhere.
"""

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.claims.chart import BLUE, GREY, ORANGE, RED, Axis, Line, Panel, draw_chart
from benchmarks.claims.claim import COMMAND, FOLKLORE, Claim, Picture, Setting, StudyResult
from quire.assembly.build import build_engine
from quire.bench.baselines.contiguous import contiguous
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.engine.engine import Engine
from quire.errors import StepFailedError
from quire.observability.machine_processors import usable_processors

FLEX = "Joshi et al., Paged Attention Meets FlexAttention, arXiv 2506.07311, abstract"
KERNELS = "Kwon et al., SOSP 2023, section 7.1; Prabhu et al., vAttention, ASPLOS 2025, section 3.3"
BLOCK_SIZE = 16
SEED = 618
MOST_OVERHEAD = 1.05  # of held bytes by those that the tokens need
PAGED_KERNEL = (1.20, 1.26)  # of paged by adjacent memory, as published
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """The shape of the model and of its load. The heads are 64 wide, and there are as many for K
    and V as for Q.

    num_tokens: decoded in one turn. compared_context: at which pages are compared with adjacent
    memory.
    """

    num_layers: int = 6
    num_heads: int = 8
    mlp_size: int = 1_408
    vocab_size: int = 8_192
    contexts: tuple[int, ...] = (1_024, 2_048, 4_096, 8_192, 16_384, 32_768)
    num_tokens: int = 100
    num_rounds: int = 5
    compared_context: int = 8_192

    @property
    def hidden_size(self) -> int:
        return 64 * self.num_heads

    @property
    def max_model_len(self) -> int:
        return self.contexts[-1] + self.num_tokens + BLOCK_SIZE


QUICK = DecodeShape(2, 2, 128, 512, (32, 64, 128), 5, 2, 64)


@dataclass(frozen=True, slots=True)
class Decoded:
    """gaps_s: between a request's tokens. held_bytes: of its memory, with its last token."""

    gaps_s: list[float]
    held_bytes: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One context in one round. reads_s: of plain reads of as many bytes as a step must read."""

    decoded: Decoded
    reads_s: list[float]


def study_contexts(setting: Setting) -> StudyResult:
    """Decoding over growing contexts, and over scattered beside adjacent pages."""
    shape = QUICK if setting.is_quick else DecodeShape()
    tokens = np.random.default_rng(SEED).integers(3, shape.vocab_size, shape.contexts[-1]).tolist()
    with random_model(shape) as (folder, weight_bytes):
        pages = _engine(shape, folder, is_paged=True)
        _scatter(pages)
        for context in shape.contexts:  # compute each prompt's new part
            decode(pages, tokens[:context], 2)
        rounds = _measure(pages, shape, tokens, weight_bytes)
        scattered, adjacent = _compare(pages, shape, folder, tokens[: shape.compared_context])
    token_bytes = _token_bytes(pages)
    reserved_bytes = adjacent[0].held_bytes
    claims = (
        _linear(shape, rounds, token_bytes, reserved_bytes),
        _latency(shape, rounds, _growth(shape, weight_bytes, token_bytes)),
        _anywhere(shape, scattered, adjacent),
    )
    picture = _picture(shape, rounds, reserved_bytes)
    return StudyResult(
        "Long contexts", claims, _notes(shape, weight_bytes, token_bytes), (picture,)
    )


def _notes(shape: DecodeShape, weight_bytes: int, token_bytes: int) -> tuple[str, ...]:
    return (
        f"The model is a Llama with random weights: {shape.num_layers} layers, hidden size"
        f" {shape.hidden_size}, {shape.num_heads} heads, as many for K and V. It has"
        f" {weight_bytes / 1e6:.0f} MB in bfloat16, and {token_bytes / 1024:g} KiB of K and V a"
        " token. One sequence runs on this machine's kernels, in wall time. Each context has"
        f" {shape.num_rounds} turns of {shape.num_tokens} tokens, in rounds over all contexts. A"
        " p99 and a median are those of the turn that other processes disturbed least.",
        "A step must read the weights, and K and V of all tokens, once. The line holds if the p99"
        " grows no more than these bytes. Beside it is a plain read of as many bytes by all"
        " cores, in the same turns. Its median, and the steps' own, may grow faster than the"
        " bytes, since the processor's caches hold more of a short context.",
        f"Scattered pages are compared with adjacent ones at {shape.compared_context:,} tokens."
        " The kernels and the prompt are the same; the other engine's memory reserves one run of"
        " blocks for the longest length. The two take turns, and medians are as above.",
    )


def _growth(shape: DecodeShape, weight_bytes: int, token_bytes: int) -> float:
    """The factor by which the bytes that a step must read grow from the first context to the
    last."""
    first, last = (
        weight_bytes + context * token_bytes for context in (shape.contexts[0], shape.contexts[-1])
    )
    return last / first


def _measure(
    engine: Engine, shape: DecodeShape, tokens: Sequence[int], weight_bytes: int
) -> dict[int, list[Turn]]:
    """Context -> its turns; contexts in turns, forwards and back."""
    bytes_read = {
        context: weight_bytes + context * _token_bytes(engine) for context in shape.contexts
    }
    memory = torch.ones(max(bytes_read.values()) // 4)
    rounds: dict[int, list[Turn]] = {context: [] for context in shape.contexts}
    for index in range(shape.num_rounds):
        for context in shape.contexts if index % 2 == 0 else shape.contexts[::-1]:
            reads_s = read_plainly(memory[: bytes_read[context] // 4], shape.num_tokens)
            decoded = decode(engine, tokens[:context], shape.num_tokens)
            rounds[context].append(Turn(decoded, reads_s))
    return rounds


def read_plainly(memory: torch.Tensor, count: int) -> list[float]:
    """Seconds of each of `count` sums over a float32 memory, by all processors together."""
    num_threads = torch.get_num_threads()  # one, where native kernels have threads of their own
    torch.set_num_threads(usable_processors())
    try:
        times_s = []
        for _ in range(count):
            started_s = time.perf_counter()
            memory.sum()
            times_s.append(time.perf_counter() - started_s)
    finally:
        torch.set_num_threads(num_threads)
    return times_s


# ---- the engine -----------------------------------------------------------------------------


@contextmanager
def random_model(shape: DecodeShape) -> Iterator[tuple[Path, int]]:
    """A model in a temporary folder, and the bytes of its weights."""
    hidden, mlp = shape.hidden_size, shape.mlp_size
    sizes = {"model.embed_tokens": (shape.vocab_size, hidden)}
    for layer in range(shape.num_layers):
        name = f"model.layers.{layer}"
        sizes |= {f"{name}.self_attn.{part}_proj": (hidden, hidden) for part in "qkvo"}
        sizes |= {f"{name}.mlp.{part}_proj": (mlp, hidden) for part in ("gate", "up")}
        sizes[f"{name}.mlp.down_proj"] = (hidden, mlp)
    norms = [f"model.layers.{layer}.input_layernorm" for layer in range(shape.num_layers)]
    norms += [name.replace("input", "post_attention") for name in norms] + ["model.norm"]
    generator = torch.Generator().manual_seed(SEED)
    tensors = {
        f"{name}.weight": (torch.randn(size, generator=generator) * 0.02).bfloat16()
        for name, size in sizes.items()
    }
    tensors |= {f"{name}.weight": torch.ones(hidden).bfloat16() for name in norms}
    with tempfile.TemporaryDirectory(prefix="quire-claims-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_config(shape)))
        save_file(tensors, Path(folder) / "model.safetensors")
        yield Path(folder), sum(tensor.nbytes for tensor in tensors.values())


def _config(shape: DecodeShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.mlp_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_model_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def _engine(shape: DecodeShape, folder: Path, *, is_paged: bool) -> Engine:
    """Room for the longest context, and for what decoding leaves in the cache beside it."""
    num_turns = len(shape.contexts) * (shape.num_rounds + 2) + 2 * shape.num_rounds
    num_left = num_turns * (shape.num_tokens // BLOCK_SIZE + 2) if is_paged else 0
    options = {
        "model": str(folder),
        "dtype": "bfloat16",
        "max_model_len": shape.max_model_len,
        "max_num_seqs": 1,
        "num_blocks": -(-shape.max_model_len // BLOCK_SIZE) + 1 + num_left,
        "block_size": BLOCK_SIZE,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": is_paged,
        "disable_log_stats": True,
        "speculation": "off",  # each step decodes one token
    }
    return build_engine(options, kv_allocator=None if is_paged else contiguous("max", "first_fit"))


def _scatter(engine: Engine) -> None:
    """Let the pool hand out its blocks in random order."""
    pool = engine.scheduler.memory.pool
    taken, _ = pool.take(pool.num_free)
    random.Random(SEED).shuffle(taken)
    pool.release_all(taken)


def decode(engine: Engine, prompt: Sequence[int], num_tokens: int) -> Decoded:
    """Serve one request alone."""
    params = DecodingParams(num_tokens + 1, temperature=0.0)
    engine.add(Request("alone", list(prompt), params))
    times_s: list[float] = []
    held_bytes = 0
    while engine.has_work():
        if len(times_s) == num_tokens:
            held_bytes = _held_bytes(engine)
        outputs = engine.step()
        now_s = time.perf_counter()
        for output in outputs:
            if output.error is not None:
                raise StepFailedError(f"decoding over a long context failed: {output.error}")
            times_s += [now_s] * len(output.token_ids)
    gaps_s = np.diff(times_s[:-1]).tolist()  # the ledger was read within the last one
    return Decoded(gaps_s, held_bytes)


def _token_bytes(engine: Engine) -> int:
    """The bytes of K and V of one token, over all layers."""
    return engine.scheduler.memory.config.groups[0].bytes_per_block // BLOCK_SIZE


def _held_bytes(engine: Engine) -> int:
    report = engine.memory_report()
    return report.total_bytes - report.cached_bytes - report.free_bytes


def _compare(
    pages: Engine, shape: DecodeShape, folder: Path, prompt: Sequence[int]
) -> tuple[list[Decoded], list[Decoded]]:
    """(over scattered pages, over adjacent ones), in turns."""
    beside = _engine(shape, folder, is_paged=False)
    scattered: list[Decoded] = []
    adjacent: list[Decoded] = []
    decode(beside, prompt[: BLOCK_SIZE * 2], 3)
    sides = [(pages, scattered), (beside, adjacent)]
    for index in range(shape.num_rounds):
        for engine, found in sides if index % 2 == 0 else sides[::-1]:
            found.append(decode(engine, prompt, shape.num_tokens))
    return scattered, adjacent


# ---- what is made of it ---------------------------------------------------------------------


def _p99_s(turns: Sequence[Sequence[float]]) -> float:
    """The 99th percentile of the turn that was disturbed least."""
    return min(float(np.percentile(times_s, 99)) for times_s in turns)


def _median_s(turns: Sequence[Sequence[float]]) -> float:
    """The median of the turn that was disturbed least."""
    return min(statistics.median(times_s) for times_s in turns)


def _gaps_s(turns: Sequence[Turn]) -> list[list[float]]:
    return [turn.decoded.gaps_s for turn in turns]


def _reads_s(turns: Sequence[Turn]) -> list[list[float]]:
    return [turn.reads_s for turn in turns]


def _linear(
    shape: DecodeShape,
    rounds: Mapping[int, Sequence[Turn]],
    token_bytes: int,
    reserved_bytes: int,
) -> Claim:
    held = {context: found[0].decoded.held_bytes for context, found in rounds.items()}
    needed = {context: (context + shape.num_tokens) * token_bytes for context in held}
    overhead = max(held[context] / needed[context] for context in held)
    first, last = shape.contexts[0], shape.contexts[-1]
    return Claim(
        f"Memory grows linearly with the context, up to {last:,} tokens",
        FLEX,
        f"{held[first] / _MIB:.3g} MiB at {first:,} to {held[last] / _MIB:.4g} MiB at {last:,}"
        f" tokens, at most {overhead:.3f}x of what the tokens need",
        f"{reserved_bytes / _MIB:.4g} MiB at any context (one run for the longest length)",
        held[first] / reserved_bytes,
        overhead <= MOST_OVERHEAD,
        f"{COMMAND} contexts",
    )


def _latency(
    shape: DecodeShape, rounds: Mapping[int, Sequence[Turn]], bytes_growth: float
) -> Claim:
    first, last = shape.contexts[0], shape.contexts[-1]
    ours = [_p99_s(_gaps_s(rounds[context])) for context in (first, last)]
    floor = [_p99_s(_reads_s(rounds[context])) for context in (first, last)]
    medians = [_median_s(_gaps_s(rounds[context])) for context in (first, last)]
    floor_medians = [_median_s(_reads_s(rounds[context])) for context in (first, last)]
    growth = ours[1] / ours[0]
    return Claim(
        "p99 of the time between tokens grows no faster than its floor, the bytes that a step"
        f" reads, up to {last:,} tokens",
        FOLKLORE,
        f"{ours[0] * 1e3:.2f} ms at {first:,}, {ours[1] * 1e3:.2f} ms at {last:,} tokens:"
        f" {growth:.1f}x (medians {medians[1] / medians[0]:.1f}x)",
        f"{bytes_growth:.2f}x the bytes; a plain read of as many: {floor[0] * 1e3:.2f} ms and"
        f" {floor[1] * 1e3:.2f} ms, {floor[1] / floor[0]:.1f}x (medians"
        f" {floor_medians[1] / floor_medians[0]:.1f}x)",
        growth / bytes_growth,
        growth <= bytes_growth,
        f"{COMMAND} contexts",
    )


def _anywhere(
    shape: DecodeShape, scattered: Sequence[Decoded], adjacent: Sequence[Decoded]
) -> Claim:
    ours, theirs = (_median_s([one.gaps_s for one in turns]) for turns in (scattered, adjacent))
    low, high = PAGED_KERNEL
    return Claim(
        f"Attention through a block table takes {low:.2f} to {high:.2f} times that over adjacent"
        " memory (holds if no more)",
        KERNELS,
        f"{ours * 1e3:.2f} ms a token over {shape.compared_context:,} tokens in pages in random"
        " order",
        f"{theirs * 1e3:.2f} ms (adjacent, in order)",
        ours / theirs,
        ours / theirs <= low,
        f"{COMMAND} contexts",
    )


def _picture(
    shape: DecodeShape, rounds: Mapping[int, Sequence[Turn]], reserved_bytes: int
) -> Picture:
    def curve(value: Callable[[Sequence[Turn]], float]) -> list[tuple[float, float]]:
        return [(context / 1024, value(rounds[context])) for context in shape.contexts]

    ticks = tuple(context / 1024 for context in shape.contexts if context >= 4096)
    axis = Axis("context, in units of 1,024 tokens", low=0.0, ticks=ticks or None)
    panels = [
        Panel(
            axis,
            Axis("time between tokens, ms"),
            [
                Line("p99", curve(lambda turns: _p99_s(_gaps_s(turns)) * 1e3), ORANGE),
                Line("median", curve(lambda turns: _median_s(_gaps_s(turns)) * 1e3), BLUE),
                Line(
                    "floor: plain read of\nas many bytes, median",
                    curve(lambda turns: _median_s(_reads_s(turns)) * 1e3),
                    GREY,
                    is_dashed=True,
                    has_marks=False,
                ),
            ],
        ),
        Panel(
            axis,
            Axis("KV memory, MiB"),
            [
                Line("pages", curve(lambda turns: turns[0].decoded.held_bytes / _MIB), BLUE),
                Line(
                    "reserved for the\nlongest length", curve(lambda _: reserved_bytes / _MIB), RED
                ),
            ],
            height=200,
        ),
    ]
    svg = draw_chart(
        "Decoding over a growing context",
        "one sequence of a small Llama with random weights, bfloat16, wall time",
        panels,
    )
    return Picture("contexts", "time between tokens and KV memory over the context", svg)
