"""The calls that recurrent layers make to update their states, and the inputs of these calls.

Layers hold a `StateCalls`: a backend of `recurrence`, or the recorder of native programs.
`recurrence.state_specs` has the formulas.

Shapes: T tokens of the step. Gated delta rule: Hk key heads, Hv value heads, dk and dv their sizes.
Mamba-2: H heads, P their size, N the state size, G groups. Convolutions: C channels, W width.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


class GatedDeltaInputs(NamedTuple):
    """The inputs of a gated delta rule for all tokens of a step."""

    #: Queries [T, Hk, dk].
    q: torch.Tensor
    #: Keys [T, Hk, dk].
    k: torch.Tensor
    #: Values [T, Hv, dv].
    v: torch.Tensor
    #: Logarithms of the decay [T, Hv].
    g: torch.Tensor
    #: Step sizes [T, Hv].
    beta: torch.Tensor


class Mamba2Inputs(NamedTuple):
    """The inputs of Mamba-2's recurrence for all tokens of a step."""

    #: Inputs of the states [T, H, P].
    x: torch.Tensor
    #: Step sizes before bias and softplus [T, H].
    dt: torch.Tensor
    #: Projections into the states [T, G, N].
    b: torch.Tensor
    #: Projections out of the states [T, G, N].
    c: torch.Tensor


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """The weights of one Mamba-2 layer's state updates, each [H]; the same in every step."""

    #: The negative decay rates, -exp(A_log).
    a: torch.Tensor
    #: The factor D of the input x in the output y; None means zeros.
    d: torch.Tensor | None = None
    #: Added to dt before the softplus; None means zeros.
    dt_bias: torch.Tensor | None = None


class StateCalls(Protocol):
    """Updates the states of recurrent layers in a planned step.

    `layer` is an index into the model's recurrent layers. Tokens after those of the planned
    sequences are padding: they are not read, and their results are undefined.
    """

    @abstractmethod
    def gated_delta(self, layer: int, inputs: GatedDeltaInputs) -> torch.Tensor:
        """Return [T, Hv, dv] in v's dtype. See GatedDeltaSpec."""
        ...

    @abstractmethod
    def mamba2(self, layer: int, inputs: Mamba2Inputs, weights: Mamba2Weights) -> torch.Tensor:
        """Return [T, H, P] in x's dtype. See Mamba2Spec."""
        ...

    @abstractmethod
    def short_conv(
        self, layer: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x [T, C], weight [C, W], bias [C] -> [T, C] in x's dtype. See ShortConvSpec."""
        ...
