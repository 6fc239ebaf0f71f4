"""The interface of recurrent backends: planned once per step, and called by each layer.

A recurrent layer keeps one state of fixed size per sequence. A state is divided into units that are
computed independently. Units are stored in blocks of the pool. The block table of the sequence's
row lists these blocks. The units of all layers of a group are stored one after another:

    unit u of a layer   in entry (first_unit + u) // units_per_page of the row's table,
                        at byte ((first_unit + u) % units_per_page) * unit_bytes of that block

A call reads the state after the row's computed tokens, computes the step's tokens in order, and
overwrites the state. A sequence's first token starts from zeros and ignores the stored state.
Drafts are computed, too, but the state that is stored is the one before them. The next step begins
with this state, and computes accepted drafts again. States are updated token by token, so that
results don't depend on the chunks of a prompt, on other sequences or on the number of threads.

To add a backend, add a file here that implements `StateBackend`, and a line in `backends.py`.

Shapes: T tokens of the step, S sequences of the step, R rows of the tables, N blocks;
`kernels.state_calls` lists the shapes of the tensors in calls.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from quire.errors import ConfigurationError
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.cpu.states.state_recorder import NativeStates
from quire.kernels.state_calls import StateCalls
from quire.recurrence.state_specs import KINDS


class RecurrentSpec(Protocol):
    """The sizes that every kind of recurrent layer has."""

    @property
    def num_units(self) -> int:
        """The number of units of one sequence's state."""
        ...

    @property
    def unit_bytes(self) -> int:
        """The size of a unit, a multiple of 64 bytes."""
        ...


@dataclass(frozen=True, slots=True)
class LayerStates:
    """Where one layer's states are stored. The module's docstring has the formula of addresses."""

    #: The pool, [N, bytes of a block] uint8.
    pages: torch.Tensor
    #: The index in `StateBatch.tables` of the layer's group.
    group: int
    #: The number of units of the group's layers before this one.
    first_unit: int
    units_per_page: int


@dataclass(slots=True)
class StateBatch:
    """The step's sequences for recurrent layers. Decoding sequences (one token each) come first."""

    #: [S + 1] int32, the index of each sequence's first token in the step; query_start[S] == T.
    query_start: torch.Tensor
    #: [S] int32, each sequence's length after this step. A sequence whose tokens are all in this
    #: step starts from zeros. Length 0 marks padding of a captured step: its state is not accessed,
    #: and its output is not read.
    context_lens: torch.Tensor
    #: [S] int64, each sequence's row in the tables; all rows differ.
    rows: torch.Tensor
    #: Each sequence's number of tokens in the step, as Python numbers, without padding.
    query_lens_list: list[int]
    #: `context_lens` as Python numbers, without padding.
    context_lens_list: list[int]
    #: `rows` as Python numbers, without padding.
    rows_list: list[int]
    #: The number of decoding sequences.
    num_decodes: int
    #: Block tables of the state groups, [R, maximal blocks] int32 each, in the same memory every
    #: step. A block is used by at most one of the step's sequences.
    tables: tuple[torch.Tensor, ...]
    #: [S] int32, the number of each sequence's last tokens that are drafts. At least one token is
    #: not. None if the step has no drafts.
    num_drafts: torch.Tensor | None = None
    #: `num_drafts` as Python numbers; empty if the step has no drafts.
    num_drafts_list: list[int] = field(default_factory=list)


class StateBackend(StateCalls):
    """Updates the states of all recurrent layers of a model, in place in their pages.

    The argument `layer` of a call is the index of the layer's spec among the specs of `bind`.
    """

    #: Whether steps with only decoding sequences can be captured once and replayed, because the
    #: backend reads only tensors. `AttentionBackend` has the same flag.
    serves_graphs = False

    def __init__(self) -> None:
        self._specs: tuple[RecurrentSpec, ...] = ()
        self._layers: tuple[LayerStates, ...] = ()
        self._batch: StateBatch | None = None

    @classmethod
    def create(cls, kernels: NativeKernels | None) -> "StateBackend":
        """Create a backend that is not bound yet.

        `kernels` are the engine's native kernels, or None. Raises ConfigurationError if the backend
        can't run.
        """
        return cls()

    @property
    def native(self) -> NativeStates | None:
        """The states for native code that runs all layers; None if the backend has none."""
        return None

    def bind(self, specs: tuple[RecurrentSpec, ...], layers: tuple[LayerStates, ...]) -> None:
        """Set the memory of all layers' states, once. `layers[i]` belongs to `specs[i]`.

        Raises ConfigurationError if the backend doesn't support the kind of a spec.
        """
        for spec in specs:
            if not isinstance(spec, KINDS):
                names = ", ".join(kind.__name__ for kind in KINDS)
                raise ConfigurationError(f"{spec} is not supported; supported kinds are: {names}")
        self._specs, self._layers = specs, layers

    def plan(self, batch: StateBatch) -> None:
        """Prepare for a step. The batch must not change until the step's last layer has run."""
        self._batch = batch
