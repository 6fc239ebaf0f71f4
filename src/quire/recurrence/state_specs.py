"""The kinds of recurrent layers, and the interface of backends that compute them.

A spec says what a layer is and how its state is cut in units; `state_backend.py` says where units
lie and what a step is. A backend moves each state token by token, in the sequence's order, so that
no result depends on how a prompt was cut in chunks, on other sequences or on the number of threads.
States are fp32, whatever the model's dtype.

To add a backend: one file here that implements `StateBackend`, one line in `backends.py`.

Shapes: T tokens of the step, S sequences, Hk key heads, Hv value heads, dk and dv their sizes, H
heads of Mamba-2, P their size, N its state size, G its groups, C channels, W width.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from quire.errors import ConfigurationError
from quire.kernels.cpu.library import NativeKernels
from quire.recurrence.state_backend import LayerStates, RecurrentSpec, StateBatch

UNIT_COLUMNS = 16
"""Of a matrix state that one unit holds, side by side, for each row."""

UNIT_CHANNELS = 64
"""Of a short convolution that one unit holds; the last unit may be filled in part."""


def _refuse(condition: bool, message: str) -> None:
    if condition:
        raise ConfigurationError(message)


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """The gated delta rule (Yang et al., "Gated Delta Networks", 2024, section 3.1).

    Per value head, with S [dk, dv], q and k of key head h * num_k_heads // num_v_heads:

        S = exp(g) S;  S = S + k (beta (v - S^T k))^T;  o = S^T q

    normalizes: q and k are divided by sqrt(sum of squares + 1e-6) first. q is then multiplied by
    dk^-0.5. A unit is 16 columns of one head's S: fp32 [dk][16]; the units of a head follow each
    other. Raises ConfigurationError for sizes that can't be.
    """

    num_k_heads: int
    num_v_heads: int
    key_dim: int
    value_dim: int
    normalizes: bool = True

    def __post_init__(self) -> None:
        _refuse(
            min(self.num_k_heads, self.num_v_heads, self.key_dim, self.value_dim) < 1,
            f"{self} has a size below 1",
        )
        _refuse(
            self.num_v_heads % self.num_k_heads != 0,
            f"num_v_heads={self.num_v_heads} is not a multiple of num_k_heads={self.num_k_heads}",
        )
        _refuse(
            self.value_dim % UNIT_COLUMNS != 0,
            f"value_dim={self.value_dim} is not a multiple of {UNIT_COLUMNS}",
        )

    @property
    def num_units(self) -> int:
        return self.num_v_heads * self.value_dim // UNIT_COLUMNS

    @property
    def unit_bytes(self) -> int:
        return self.key_dim * UNIT_COLUMNS * 4


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """The state space of Mamba-2 (Dao and Gu, "Transformers are SSMs", 2024, section 7).

    Per head, with S [N, P], B and C of group h * num_groups // num_heads, dt = softplus(dt +
    dt_bias) within [min_step, max_step]:

        S = exp(dt A) S + B (dt x)^T;  y = S^T C + D x

    A unit is 16 columns of one head's S (16 elements of x): fp32 [N][16]; the units of a head
    follow each other. Raises ConfigurationError for sizes that can't be.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int = 1
    min_step: float = 0.0
    max_step: float = float("inf")

    def __post_init__(self) -> None:
        _refuse(
            min(self.num_heads, self.head_dim, self.state_size, self.num_groups) < 1,
            f"{self} has a size below 1",
        )
        _refuse(
            self.num_heads % self.num_groups != 0,
            f"num_heads={self.num_heads} is not a multiple of num_groups={self.num_groups}",
        )
        _refuse(
            self.head_dim % UNIT_COLUMNS != 0,
            f"head_dim={self.head_dim} is not a multiple of {UNIT_COLUMNS}",
        )

    @property
    def num_units(self) -> int:
        return self.num_heads * self.head_dim // UNIT_COLUMNS

    @property
    def unit_bytes(self) -> int:
        return self.state_size * UNIT_COLUMNS * 4


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A causal convolution of each channel by itself over the last `width` tokens.

        y[t] = bias + sum over i of weight[i] x[t - width + 1 + i], then y * sigmoid(y) if has_silu

    The state is the last width - 1 inputs, zeros before the first. A unit is 64 channels: fp32
    [width - 1][64], the oldest input first. Raises ConfigurationError for sizes that can't be.
    """

    num_channels: int
    width: int
    has_silu: bool = True

    def __post_init__(self) -> None:
        _refuse(self.num_channels < 1, f"num_channels={self.num_channels} is below 1")
        _refuse(not 2 <= self.width <= 4, f"width={self.width} is not 2, 3 or 4")

    @property
    def num_units(self) -> int:
        return -(-self.num_channels // UNIT_CHANNELS)

    @property
    def unit_bytes(self) -> int:
        return (self.width - 1) * UNIT_CHANNELS * 4


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """What a Mamba-2 layer learned for its states, each [H]. a: negative, i.e. -exp(A_log).

    d and dt_bias: None: zeros.
    """

    a: torch.Tensor
    d: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None


class StateBackend(ABC):
    """Moves the states of all recurrent layers of a model, in their pages.

    `layer` is an index into the specs that were bound. Of tokens of padding, behind those of the
    batch's sequences, nothing is read; their results may be anything.

    serves_graphs: as `AttentionBackend` has it.
    """

    serves_graphs = False

    @classmethod
    def create(cls, kernels: NativeKernels | None) -> "StateBackend":
        """A backend that is not bound yet. kernels: the engine's native ones, where there are any.

        Raises ConfigurationError where it can't run.
        """
        return cls()

    @abstractmethod
    def bind(self, specs: tuple[RecurrentSpec, ...], layers: tuple[LayerStates, ...]) -> None:
        """Attach the memory, once, after it was allocated. `layers[i]` belongs to `specs[i]`.

        Raises ConfigurationError for a spec of a kind that it doesn't compute.
        """

    @abstractmethod
    def plan(self, batch: StateBatch) -> None:
        """Prepare for a step; the batch stays unchanged until the step's last layer ran."""

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
