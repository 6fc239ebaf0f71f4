"""The kinds of recurrent layers: formulas, sizes, and the units of their states.

`state_backend.py` explains where units are stored and how backends update them. States are fp32 for
models of any dtype.

Shapes: dk and dv are the sizes of key and value heads. In Mamba-2, H is the number of heads, P a
head's size and N its state size. C is the number of channels of a convolution.
"""

from dataclasses import dataclass

from quire.errors import ConfigurationError

UNIT_COLUMNS = 16
"""The number of adjacent columns of a matrix state that form a unit. A unit has all rows."""

UNIT_CHANNELS = 64
"""The number of channels of a convolution that form a unit. The last unit may be partly filled."""


def _refuse(condition: bool, message: str) -> None:
    if condition:
        raise ConfigurationError(message)


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """The gated delta rule (Yang et al., "Gated Delta Networks", 2024, section 3.1).

    For value head h, with state S [dk, dv], and q and k of key head h * num_k_heads // num_v_heads:

        S = exp(g) S;  S = S + k (beta (v - S^T k))^T;  o = S^T q

    where q is multiplied by dk^-0.5 first. A unit is 16 columns of one head's S, fp32 [dk][16]; the
    units of a head are stored one after another. Raises ConfigurationError for impossible sizes.
    """

    num_k_heads: int
    num_v_heads: int
    key_dim: int
    value_dim: int
    #: Whether q and k are first divided by sqrt(sum of squares + 1e-6).
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

    For head h, with state S [N, P], B and C of group h * num_groups // num_heads, and dt =
    softplus(dt + dt_bias), clamped to [min_step, max_step]:

        S = exp(dt A) S + B (dt x)^T;  y = S^T C + D x

    A unit is 16 columns of one head's S (16 elements of x), fp32 [N][16]; the units of a head
    are stored one after another. Raises ConfigurationError for impossible sizes.
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
    """A causal depthwise convolution over the last `width` tokens.

        y[t] = bias + sum over i of weight[i] x[t - width + 1 + i], then y * sigmoid(y) if has_silu

    The state is the last width - 1 inputs, which are zeros before the first token. A unit is 64
    channels, fp32 [width - 1][64], oldest input first. Raises ConfigurationError for impossible
    sizes.
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


KINDS = GatedDeltaSpec, Mamba2Spec, ShortConvSpec
"""The kinds that every backend supports."""
