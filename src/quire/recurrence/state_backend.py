"""The interface of recurrent backends: planned each step, run each layer.

A recurrent layer keeps one state of a fixed size for each sequence, cut in units that are computed
independently of each other. The states lie in blocks of the pool that a row's table names, all
layers of a group one after the other:

    unit u of a layer   in entry (first_unit + u) // units_per_page of the row's table,
                        at byte ((first_unit + u) % units_per_page) * unit_bytes of that block

The state there is that after the row's computed tokens. A run reads it, computes the step's tokens
in their order, and writes the state after them to the same place. What a sequence's first token
finds there may be anything: it begins with zeros. Each state is moved token by token, so that no
result depends on how a prompt was cut in chunks, on other sequences or on the number of threads.

To add a backend: one file here that implements `StateBackend`, one line in `backends.py`.

Shapes: T tokens of the step, S sequences of the step, R rows of the tables, N blocks, Hk key heads,
Hv value heads, dk and dv their sizes, H heads of Mamba-2, P their size, N its state size, G its
groups, C channels, W width.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch

from quire.errors import ConfigurationError
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.cpu.states.state_recorder import NativeStates
from quire.recurrence.state_specs import KINDS, Mamba2Weights


class RecurrentSpec(Protocol):
    """What is asked of the spec of every kind of recurrent layer.

    num_units: of one state. unit_bytes: of each, a multiple of 64.
    """

    @property
    def num_units(self) -> int: ...

    @property
    def unit_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class LayerStates:
    """Where one layer's states lie. pages: [N, bytes of a block] uint8, the pool. group: of
    `StateBatch.tables`. The others: see the module's text."""

    pages: torch.Tensor
    group: int
    first_unit: int
    units_per_page: int


@dataclass(slots=True)
class StateBatch:
    """One step as recurrent layers see it. Decoding sequences (one token each) come first.

    query_start: [S + 1] int32, first token of each sequence in the step; query_start[S] == T.
    context_lens: [S] int32, tokens of each sequence after this step. One that is as long as the
        sequence's tokens in this step begins with zeros; one of 0 tokens is padding of a captured
        step, whose state isn't touched and whose output isn't read.
    rows: [S] int64, each sequence's row of the tables; no two are equal.
    query_lens_list, context_lens_list, rows_list: the same as Python numbers, without padding.
    num_decodes: the first so many sequences have exactly one token.
    tables: of each state group, [R, most blocks] int32, the same memory every step. No block is
        named by two of a step's sequences.
    """

    query_start: torch.Tensor
    context_lens: torch.Tensor
    rows: torch.Tensor
    query_lens_list: list[int]
    context_lens_list: list[int]
    rows_list: list[int]
    num_decodes: int
    tables: tuple[torch.Tensor, ...]


class StateCalls(Protocol):
    """What a recurrent layer calls: `StateBackend`'s methods of the planned step."""

    def gated_delta(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor: ...

    def mamba2(
        self,
        layer: int,
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        weights: Mamba2Weights,
    ) -> torch.Tensor: ...

    def short_conv(
        self, layer: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor: ...


class StateBackend(ABC):
    """Moves the states of all recurrent layers of a model, which call its methods, in their pages.

    `layer` is an index into the specs that were bound. Of tokens of padding, behind those of the
    batch's sequences, nothing is read; their results may be anything.

    serves_graphs: as `AttentionBackend` has it: of steps in which all sequences decode it reads
    nothing but tensors, so that they may be captured once and replayed.
    """

    serves_graphs = False

    def __init__(self) -> None:
        self._specs: tuple[RecurrentSpec, ...] = ()
        self._layers: tuple[LayerStates, ...] = ()
        self._batch: StateBatch | None = None

    @classmethod
    def create(cls, kernels: NativeKernels | None) -> "StateBackend":
        """A backend that is not bound yet. kernels: the engine's native ones, where there are any.

        Raises ConfigurationError where it can't run.
        """
        return cls()

    @property
    def native(self) -> NativeStates | None:
        """For a native program of all layers; None: this backend is called by its methods alone."""
        return None

    def bind(self, specs: tuple[RecurrentSpec, ...], layers: tuple[LayerStates, ...]) -> None:
        """Attach the memory, once, after it was allocated. `layers[i]` belongs to `specs[i]`.

        Raises ConfigurationError for a spec of a kind that it doesn't compute.
        """
        for spec in specs:
            if not isinstance(spec, KINDS):
                names = ", ".join(kind.__name__ for kind in KINDS)
                raise ConfigurationError(f"{spec} can't be computed here; there is: {names}")
        self._specs, self._layers = specs, layers

    def plan(self, batch: StateBatch) -> None:
        """Prepare for a step; the batch stays unchanged until the step's last layer ran."""
        self._batch = batch

    @abstractmethod
    def gated_delta(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        """q, k [T, Hk, dk], v [T, Hv, dv], g (log of the decay) and beta [T, Hv] -> [T, Hv, dv].

        The result has v's dtype. See GatedDeltaSpec.
        """

    @abstractmethod
    def mamba2(
        self,
        layer: int,
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        weights: Mamba2Weights,
    ) -> torch.Tensor:
        """x [T, H, P], dt [T, H] before bias and softplus, b, c [T, G, N] -> [T, H, P].

        The result has x's dtype. See Mamba2Spec.
        """

    @abstractmethod
    def short_conv(
        self, layer: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x [T, C], weight [C, W], bias [C] -> [T, C] in x's dtype. See ShortConvSpec."""
