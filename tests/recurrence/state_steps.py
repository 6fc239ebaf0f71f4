"""Random sequences through recurrent layers, in any steps and over any pages."""

from dataclasses import dataclass, field

import torch

from quire.kernels.state_calls import GatedDeltaInputs, Mamba2Inputs, Mamba2Weights
from quire.recurrence import reference
from quire.recurrence.state_backend import LayerStates, StateBackend, StateBatch
from quire.recurrence.state_specs import (
    GatedDeltaSpec,
    Mamba2Spec,
    ShortConvSpec,
)

Spec = GatedDeltaSpec | Mamba2Spec | ShortConvSpec
SPECS: tuple[Spec, ...] = (
    GatedDeltaSpec(2, 4, key_dim=24, value_dim=48),
    GatedDeltaSpec(1, 1, key_dim=17, value_dim=32, normalizes=False),
    Mamba2Spec(4, head_dim=48, state_size=19, num_groups=2, min_step=0.1, max_step=1.5),
    Mamba2Spec(2, head_dim=16, state_size=32),
    ShortConvSpec(150, width=4),
    ShortConvSpec(64, width=3, has_silu=False),
    ShortConvSpec(33, width=2),
)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(spec: Spec, num_tokens: int, seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The inputs of one sequence's tokens, in the order of the call's inputs."""
    if isinstance(spec, GatedDeltaSpec):
        keys = (num_tokens, spec.num_k_heads, spec.key_dim)
        gates = (num_tokens, spec.num_v_heads)
        q, k = (random(*keys, seed=seed + i).to(dtype) * 0.3 for i in (0, 1))
        v = random(*gates, spec.value_dim, seed=seed + 2).to(dtype)
        return [q, k, v, -random(*gates, seed=seed + 3).abs(), random(*gates, seed=9).sigmoid()]
    if isinstance(spec, Mamba2Spec):
        bc = (num_tokens, spec.num_groups, spec.state_size)
        x = random(num_tokens, spec.num_heads, spec.head_dim, seed=seed).to(dtype)
        dt = random(num_tokens, spec.num_heads, seed=seed + 1)
        return [x, dt, *(random(*bc, seed=seed + i).to(dtype) for i in (2, 3))]
    return [random(num_tokens, spec.num_channels, seed=seed).to(dtype)]


def mamba_weights(spec: Mamba2Spec) -> Mamba2Weights:
    a, d, bias = (random(spec.num_heads, seed=seed) for seed in (90, 91, 92))
    return Mamba2Weights(-a.exp(), d, bias)


def conv_weights(spec: ShortConvSpec) -> tuple[torch.Tensor, torch.Tensor | None]:
    bias = random(spec.num_channels, seed=94) if spec.has_silu else None
    return random(spec.num_channels, spec.width, seed=93), bias


def call(backend: StateBackend, spec: Spec, given: list[torch.Tensor]) -> torch.Tensor:
    if isinstance(spec, GatedDeltaSpec):
        return backend.gated_delta(0, GatedDeltaInputs(*given))
    if isinstance(spec, Mamba2Spec):
        return backend.mamba2(0, Mamba2Inputs(*given), mamba_weights(spec))
    return backend.short_conv(0, *given, *conv_weights(spec))


def exact(spec: Spec, given: list[torch.Tensor]) -> torch.Tensor:
    """The results of a sequence from its first token on, in float64."""
    if isinstance(spec, GatedDeltaSpec):
        state = torch.zeros(spec.num_v_heads, spec.key_dim, spec.value_dim, dtype=torch.double)
        return reference.gated_delta(spec, state, GatedDeltaInputs(*given))[0]
    if isinstance(spec, Mamba2Spec):
        state = torch.zeros(spec.num_heads, spec.state_size, spec.head_dim, dtype=torch.double)
        return reference.mamba2(spec, state, Mamba2Inputs(*given), mamba_weights(spec))[0]
    state = torch.zeros(spec.width - 1, spec.num_channels, dtype=torch.double)
    return reference.short_conv(spec, state, given[0], *conv_weights(spec))[0]


@dataclass
class World:
    """Pages of garbage, with a table of rows whose states lie in pages of no order."""

    backend: StateBackend
    spec: Spec
    units_per_page: int = 3
    first_unit: int = 0
    num_rows: int = 5
    computed: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        per_row = -(-(self.first_unit + self.spec.num_units) // self.units_per_page)
        count = per_row * self.num_rows
        order = torch.randperm(count, generator=torch.Generator().manual_seed(5))
        self.table = order.to(torch.int32).view(self.num_rows, per_row)
        size = -(-self.units_per_page * self.spec.unit_bytes // 64) * 64 + 64
        self.pages = torch.full((count, size), 0xFF, dtype=torch.uint8)  # NaN, read as fp32
        where = LayerStates(self.pages, 0, self.first_unit, self.units_per_page)
        self.backend.bind((self.spec,), (where,))

    def step(
        self, parts: dict[int, list[torch.Tensor]], drafts: dict[int, int] | None = None
    ) -> dict[int, torch.Tensor]:
        """Each row's next tokens -> their results; those of one token come first.

        drafts: how many of a row's last tokens are drafts, which the row's state leaves out.
        """
        rows = sorted(parts, key=lambda row: len(parts[row][0]) > 1)
        lengths = [len(parts[row][0]) for row in rows]
        for row, length in zip(rows, lengths, strict=True):
            self.computed[row] = self.computed.get(row, 0) + length
        contexts = [self.computed[row] for row in rows]
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        batch = StateBatch(
            query_start=starts,
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            rows=torch.tensor(rows),
            query_lens_list=lengths,
            context_lens_list=contexts,
            rows_list=rows,
            num_decodes=sum(length == 1 for length in lengths),
            tables=(self.table,),
        )
        if drafts is not None:
            batch.num_drafts_list = [drafts.get(row, 0) for row in rows]
            batch.num_drafts = torch.tensor(batch.num_drafts_list, dtype=torch.int32)
            for row, count in drafts.items():
                self.computed[row] -= count
        self.backend.plan(batch)
        given = [torch.cat(tensors) for tensors in zip(*(parts[r] for r in rows), strict=True)]
        return dict(zip(rows, call(self.backend, self.spec, given).split(lengths), strict=True))

    def copy(self, source: int, target: int) -> None:
        """As a fork or a snapshot: the pages of one row to another's."""
        self.pages[self.table[target].long()] = self.pages[self.table[source].long()]
        self.computed[target] = self.computed[source]


def cut(given: list[torch.Tensor], *sizes: int) -> list[list[torch.Tensor]]:
    """A sequence's tokens in chunks."""
    return [list(part) for part in zip(*(x.split(list(sizes)) for x in given), strict=True)]
