"""The least time that a model's work can take on a machine, from its bytes and operations alone.

A step reads every weight that it uses and the K and V of every context, and computes two operations
per weight and token, and four per query head, head size and (query, key) pair of attention:

    step time >= max(bytes / bandwidth, linear ops / matrix rate + attention ops / bf16 matrix rate)

Weights count as they are stored, K and V as bf16, attention only below the diagonal, the vocabulary
projection only for positions that are sampled. Caches, activations and everything between are free.
The roofline is measured by `roofline.py`. Knows no engine.

(S. Williams, A. Waterman, D. Patterson: Roofline. CACM 52(4), 2009.)
"""

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

KV_BYTES = 2  # bf16
DECODE_LENGTHS = (128, 128)  # of one stream: prompt, output
MAX_STEP_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Roofline:
    """The machine's best rates: bytes read per second, operations per second by precision."""

    read_bytes_s: float
    ops_s: dict[str, float]

    @classmethod
    def best(cls, measured: Sequence[Mapping[str, Any]]) -> "Roofline":
        """The best of what `roofline.py` wrote, each figure on its own: a floor must not be
        beaten, and noise only lowers it."""
        rates = [one["ops_s"] for one in measured]
        return cls(
            max(one["read_bytes_s"] for one in measured),
            {name: max(one[name] for one in rates) for name in rates[0]},
        )


@dataclass(frozen=True, slots=True)
class Precision:
    """How weights are stored and multiplied.

    layer_bytes, head_bytes: per weight of the layers, and of the vocabulary projection, scales
    included. rate: the key of Roofline.ops_s for linear layers.
    """

    name: str
    layer_bytes: float
    head_bytes: float
    rate: str


PRECISIONS = {
    one.name: one
    for one in (
        Precision("fp32", 4.0, 4.0, "fp32"),
        Precision("bf16", 2.0, 2.0, "bf16"),
        # A scale per output channel is 4 bytes in hundreds of weights: not counted.
        Precision("int8", 1.0, 1.0, "int8"),
        # A scale and an offset, of a byte each, for each group of 32.
        Precision("int4", 0.5 + 2 / 32, 0.5 + 2 / 32, "int4"),
        # A scale of two bytes for each 32.
        Precision("Q8_0", 1 + 2 / 32, 1 + 2 / 32, "int8"),
        # About one weight in seven of the layers is Q6_K, the others are Q4_K. The head is Q6_K.
        Precision("Q4_K_M", (6 * 144 + 210) / 7 / 256, 210 / 256, "int4"),
    )
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder of the Llama family. layer_weights, head_weights: how many."""

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer_weights: int
    head_weights: int

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelShape":
        """From config.json in Hugging Face form."""
        raw = json.loads((folder / "config.json").read_text())
        hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
        kv_heads = raw.get("num_key_value_heads") or heads
        head_dim = raw.get("head_dim") or hidden // heads
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        mlp = 3 * hidden * raw["intermediate_size"]
        return cls(
            name=folder.name,
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            layer_weights=raw["num_hidden_layers"] * (attention + mlp),
            head_weights=raw["vocab_size"] * hidden,
        )

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * KV_BYTES

    def attention_ops(self, first: int, count: int) -> int:
        """Operations of `count` queries at positions from `first` on, each over all keys up to its
        own."""
        num_pairs = count * first + count * (count + 1) // 2
        return 4 * self.num_layers * self.num_heads * self.head_dim * num_pairs


@dataclass(frozen=True, slots=True)
class Step:
    """The work of one step: tokens computed, positions sampled, context tokens whose K and V are
    read, operations of attention."""

    num_tokens: int
    num_sampled: int
    num_context_tokens: int
    attention_ops: int

    def __add__(self, other: "Step") -> "Step":
        return Step(
            self.num_tokens + other.num_tokens,
            self.num_sampled + other.num_sampled,
            self.num_context_tokens + other.num_context_tokens,
            self.attention_ops + other.attention_ops,
        )


NO_WORK = Step(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Floors:
    """The least times of one model at one precision on one machine."""

    shape: ModelShape
    precision: Precision
    roofline: Roofline

    def step_s(self, step: Step) -> float:
        """The least seconds of one step; the docstring of the module has the formula."""
        shape, ops_s = self.shape, self.roofline.ops_s
        # A step reads only one row per token of the input embedding, which is negligible.
        read = shape.layer_weights * self.precision.layer_bytes
        read += shape.head_weights * self.precision.head_bytes * (step.num_sampled > 0)
        read += step.num_context_tokens * shape.kv_bytes_per_token
        linear_ops = 2 * shape.layer_weights * step.num_tokens
        linear_ops += 2 * shape.head_weights * step.num_sampled
        # Attention is not quantized: q, k and v stay in bf16, or in fp32 with fp32 weights.
        rate = "fp32" if self.precision.name == "fp32" else "bf16"
        compute_s = linear_ops / ops_s[self.precision.rate] + step.attention_ops / ops_s[rate]
        return max(read / self.roofline.read_bytes_s, compute_s)

    def chunk(self, first: int, count: int, *, sampled: bool) -> Step:
        """The work of one sequence that computes `count` tokens at positions from `first` on."""
        ops = self.shape.attention_ops(first, count)
        return Step(count, int(sampled), first + count, ops)

    def decode_tok_s(self, contexts: Sequence[int]) -> float:
        """Tokens per second of all sequences, which have these numbers of tokens before the new
        one."""
        total = NO_WORK
        for context in contexts:
            total += self.chunk(context, 1, sampled=True)
        return len(contexts) / self.step_s(total)

    def one_stream_tok_s(self) -> float:
        """Tokens per second after the first, for DECODE_LENGTHS."""
        prompt, output = DECODE_LENGTHS
        contexts = range(prompt, prompt + output - 1)
        seconds = sum(self.step_s(self.chunk(first, 1, sampled=True)) for first in contexts)
        return len(contexts) / seconds

    def prefill_tok_s(self, num_tokens: int) -> float:
        """Prompt tokens per second to the first token."""
        return num_tokens / self.step_s(self.chunk(0, num_tokens, sampled=True))

    def crowd_tok_s(self, lengths: Sequence[tuple[int, int]], max_num_seqs: int) -> float:
        """Output tokens per second with continuous batching, all (prompt, output) given at once."""
        seconds = sum(self.step_s(step) for step in self._crowd_steps(lengths, max_num_seqs))
        return sum(output for _, output in lengths) / seconds

    def crowd_ops_tok_s(self, lengths: Sequence[tuple[int, int]]) -> float:
        """The bound by operations alone, as if one step computed all sequences."""
        total = NO_WORK
        for prompt, output in lengths:
            total += self.chunk(0, prompt + output - 1, sampled=False)
        num_output = sum(output for _, output in lengths)
        return num_output / self.step_s(replace(total, num_sampled=num_output))

    def _crowd_steps(self, lengths: Sequence[tuple[int, int]], max_num_seqs: int) -> Iterator[Step]:
        """Every running sequence goes on, then prompts in order fill the step, cut where needed."""
        waiting = deque(_Crowded(prompt, output) for prompt, output in lengths)
        running: list[_Crowded] = []
        while waiting or running:
            step = NO_WORK
            for one in running:
                step += self._advance(one, 1)
            while waiting and step.num_tokens < MAX_STEP_TOKENS and len(running) < max_num_seqs:
                step += self._advance(waiting[0], MAX_STEP_TOKENS - step.num_tokens)
                if waiting[0].num_computed < waiting[0].prompt_len:
                    break
                running.append(waiting.popleft())
            running = [one for one in running if one.num_left]
            yield step

    def _advance(self, one: "_Crowded", most: int) -> Step:
        """One decode token, or as much of the prompt as `most` allows; sampled at its end."""
        first = one.num_computed
        count = max(1, min(most, one.prompt_len - first))
        one.num_computed += count
        sampled = one.num_computed >= one.prompt_len
        one.num_left -= sampled
        return self.chunk(first, count, sampled=sampled)


@dataclass(slots=True)
class _Crowded:
    """A request under way. num_left: tokens still to be sampled."""

    prompt_len: int
    num_left: int
    num_computed: int = 0
