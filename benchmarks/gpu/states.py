"""Recurrent layers on the device: right in steps of any chunks, and how fast.

Decode reads and writes each sequence's state once: its floor is those bytes at the copy's
bandwidth. A prompt goes token by token, which no bandwidth and no product bounds: its time is
reported.
"""

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.attention import BOUNDS, relative_error
from benchmarks.gpu.harness import Bench
from quire.kernels.state_calls import GatedDeltaInputs, Mamba2Inputs, Mamba2Weights
from quire.recurrence import reference
from quire.recurrence.backends import select
from quire.recurrence.state_backend import LayerStates, StateBackend, StateBatch
from quire.recurrence.state_specs import (
    GatedDeltaSpec,
    Mamba2Spec,
    ShortConvSpec,
)

DECODE_GOAL = 0.80
NUM_SEQUENCES, PROMPT_TOKENS = 16, 2048
STATE_BYTES = 2**28
"""Of all layers' states that a decode step reads: too many for the L2 cache."""

Spec = GatedDeltaSpec | Mamba2Spec | ShortConvSpec

QWEN3_NEXT = GatedDeltaSpec(16, 32, key_dim=128, value_dim=128)
FALCON_H1 = Mamba2Spec(32, head_dim=128, state_size=256, num_groups=2)
MAMBA2 = Mamba2Spec(64, head_dim=64, state_size=128)
SHAPES: dict[str, Spec] = {
    "gated delta rule of Qwen3-Next": QWEN3_NEXT,
    "Mamba-2 of 32 heads of 128, 256 inside": FALCON_H1,
    "Mamba-2 of 64 heads of 64, 128 inside": MAMBA2,
    "convolution of Qwen3-Next": ShortConvSpec(8192, width=4),
}
ODD: tuple[Spec, ...] = (
    GatedDeltaSpec(2, 4, key_dim=24, value_dim=48),
    GatedDeltaSpec(1, 2, key_dim=192, value_dim=32, normalizes=False),
    Mamba2Spec(4, head_dim=48, state_size=19, num_groups=2, min_step=0.1, max_step=1.5),
    ShortConvSpec(150, width=3, has_silu=False),
)
SMALL: dict[str, Spec] = {"gated delta rule": GatedDeltaSpec(1, 1, key_dim=8, value_dim=16)}


@dataclass(slots=True)
class Sequences:
    """Layers of one kind over a pool whose blocks lie in random order; what was not written is NaN.

    computed: tokens of each sequence so far. learned: what a call takes behind the tokens, made
    once: on a device it is a handful of launches.
    """

    backend: StateBackend
    spec: Spec
    table: torch.Tensor
    computed: list[int]
    learned: tuple[Any, ...]

    @classmethod
    def of(cls, bench: Bench, spec: Spec, num_sequences: int, num_layers: int = 1) -> "Sequences":
        units_per_page = 7
        entries = -(-spec.num_units * num_layers // units_per_page)
        order = torch.randperm(entries * num_sequences).to(torch.int32)
        table = order.view(num_sequences, entries).to(bench.device)
        page_bytes = -(-units_per_page * spec.unit_bytes // 64) * 64
        shape = (entries * num_sequences, page_bytes)
        pages = torch.full(shape, 255, dtype=torch.uint8, device=bench.device)
        layers = tuple(
            LayerStates(pages, 0, layer * spec.num_units, units_per_page)
            for layer in range(num_layers)
        )
        backend = select(bench.device.type, None, is_triton=True)
        backend.bind((spec,) * num_layers, layers)
        return cls(backend, spec, table, [0] * num_sequences, learned_of(spec, bench.device))

    def plan(self, lengths: dict[int, int]) -> None:
        """Plan the step in which each of these sequences computes its number of tokens."""
        for sequence, length in lengths.items():
            self.computed[sequence] += length
        device, lens = self.table.device, list(lengths.values())
        contexts = [self.computed[sequence] for sequence in lengths]
        starts = torch.tensor([0, *lens]).cumsum(0)
        batch = StateBatch(
            query_start=starts.to(device, torch.int32),
            context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
            rows=torch.tensor(list(lengths), device=device),
            query_lens_list=lens,
            context_lens_list=contexts,
            rows_list=list(lengths),
            num_decodes=sum(length == 1 for length in lens),
            tables=(self.table,),
        )
        self.backend.plan(batch)

    def run(self, given: list[torch.Tensor], layer: int = 0) -> torch.Tensor:
        if isinstance(self.spec, GatedDeltaSpec):
            return self.backend.gated_delta(layer, GatedDeltaInputs(*given))
        if isinstance(self.spec, Mamba2Spec):
            return self.backend.mamba2(layer, Mamba2Inputs(*given), *self.learned)
        return self.backend.short_conv(layer, *given, *self.learned)


def learned_of(spec: Spec, device: torch.device) -> tuple[Any, ...]:
    if isinstance(spec, Mamba2Spec):
        return (weights_of(spec, device),)
    return taps_of(spec, device) if isinstance(spec, ShortConvSpec) else ()


def weights_of(spec: Mamba2Spec, device: torch.device) -> Mamba2Weights:
    steps = torch.arange(spec.num_heads, device=device) / spec.num_heads
    return Mamba2Weights(-0.5 - steps, steps, -steps)


def taps_of(spec: ShortConvSpec, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    channels = torch.arange(spec.num_channels, device=device) / spec.num_channels
    return torch.stack([(channels + i).cos() for i in range(spec.width)], dim=1), channels - 0.5


def inputs_of(bench: Bench, spec: Spec, num_tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Random, as the layer's arguments."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn((num_tokens, *shape), device=bench.device)

    if isinstance(spec, GatedDeltaSpec):
        keys = (spec.num_k_heads, spec.key_dim)
        q, k = ((random(*keys) * spec.key_dim**-0.5).to(dtype) for _ in range(2))
        v = random(spec.num_v_heads, spec.value_dim).to(dtype)
        return [q, k, v, -random(spec.num_v_heads).abs(), random(spec.num_v_heads).sigmoid()]
    if isinstance(spec, Mamba2Spec):
        x, dt = random(spec.num_heads, spec.head_dim).to(dtype), random(spec.num_heads)
        return [x, dt, *(random(spec.num_groups, spec.state_size).to(dtype) for _ in range(2))]
    return [random(spec.num_channels).to(dtype)]


def exact(spec: Spec, given: list[torch.Tensor]) -> torch.Tensor:
    """The results of a sequence from its first token on, in float64."""
    where = {"dtype": torch.double, "device": given[0].device}
    if isinstance(spec, GatedDeltaSpec):
        state = torch.zeros(spec.num_v_heads, spec.key_dim, spec.value_dim, **where)
        return reference.gated_delta(spec, state, GatedDeltaInputs(*given))[0]
    if isinstance(spec, Mamba2Spec):
        state = torch.zeros(spec.num_heads, spec.state_size, spec.head_dim, **where)
        learned = learned_of(spec, given[0].device)
        return reference.mamba2(spec, state, Mamba2Inputs(*given), *learned)[0]
    state = torch.zeros(spec.width - 1, spec.num_channels, **where)
    return reference.short_conv(spec, state, given[0], *learned_of(spec, given[0].device))[0]


def check_states(bench: Bench, dtype: torch.dtype) -> None:
    """Against float64, and to the bit against the same tokens in chunks beside another sequence."""
    specs = list(SMALL.values()) if bench.small else [*SHAPES.values(), *ODD]
    sizes = [3, 1, 2] if bench.small else [37, 1, 1, 90]
    worst, is_lawful = 0.0, True
    for spec in specs:
        given = inputs_of(bench, spec, sum(sizes), dtype)
        alone = Sequences.of(bench, spec, 2)
        alone.plan({1: sum(sizes)})
        whole = alone.run(given)
        worst = max(worst, relative_error(whole, exact(spec, given)))
        crowd = Sequences.of(bench, spec, 2)
        found = []
        for part in zip(*(x.split(sizes) for x in given), strict=True):
            count = len(part[0])
            crowd.plan({0: count, 1: count})
            both = crowd.run([torch.cat([x, x]) for x in part])
            found.append(both[count:])
        is_lawful &= torch.equal(torch.cat(found), whole)
    bench.at_most(f"states, {str(dtype)[6:]}", worst, BOUNDS[dtype], is_time=False)
    bench.check(f"states in chunks and in company, the same bits, {str(dtype)[6:]}", is_lawful)


def measure_states(bench: Bench) -> None:
    """Decode steps of 16 sequences, and a prompt of 2,048 tokens."""
    for name, spec in (SMALL if bench.small else SHAPES).items():
        _measure_decode(bench, name, spec)
        _measure_prompt(bench, name, spec)


def _measure_decode(bench: Bench, name: str, spec: Spec) -> None:
    count = 2 if bench.small else NUM_SEQUENCES
    state_bytes = count * spec.num_units * spec.unit_bytes
    num_layers = 1 if bench.small else -(-STATE_BYTES // state_bytes)
    step = Sequences.of(bench, spec, count, num_layers)
    # First tokens, so that what is read are numbers: a sequence without any reads no state.
    first = inputs_of(bench, spec, count, bench.dtype)
    for _ in range(2):
        step.plan(dict.fromkeys(range(count), 1))
        for layer in range(num_layers):
            out = step.run(first, layer)

    def decode() -> None:
        for layer in range(num_layers):
            step.run(first, layer)

    seconds = bench.time_graph_s(decode) / num_layers
    moved = 2 * state_bytes + sum(x.nbytes for x in (*first, out))
    share = moved / seconds / bench.roofline().read_bytes_s
    note = f"{seconds * 1e6:.1f} us, {moved / seconds / 1e9:.0f} GB/s"
    label = f"{name}, {count} sequences decode"
    if isinstance(spec, ShortConvSpec):  # so little that a launch is most of it
        bench.add(label, share, "of copy bandwidth", note=note)
    else:
        bench.at_least(label, share, DECODE_GOAL, "of copy bandwidth", note=note)


def _measure_prompt(bench: Bench, name: str, spec: Spec) -> None:
    num_tokens = 3 if bench.small else PROMPT_TOKENS
    step = Sequences.of(bench, spec, 1)
    given = inputs_of(bench, spec, num_tokens, bench.dtype)
    step.plan({0: num_tokens})
    seconds = bench.time_s(lambda: step.run(given))
    note = f"{seconds / num_tokens * 1e9:.0f} ns a token"
    bench.add(f"{name}, a prompt of {num_tokens} tokens", seconds * 1e3, "ms a layer", note=note)
