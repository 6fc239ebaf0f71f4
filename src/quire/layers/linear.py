"""Linear layers, whose parameters and arithmetic belong to exchangeable methods.

A `Linear` declares how it may be sharded (kind, shard axis) and which parts are fused in it. A
`LinearMethod` owns its parameters and its arithmetic, and a `LinearAdapter` may add to its output.
Model code names neither methods nor adapters, so quantization, tensor parallelism and LoRA need no
change in it.

Shapes: ... any leading dimensions, I input size, O output size (the sum of the parts).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Protocol

import torch
from torch import nn

from quire.formats.block_quantized.weights import BlockQuantizedRows
from quire.formats.dense import DenseMethod
from quire.formats.weight_format import LinearMethod, LinearModule
from quire.kernels.unnormed_rows import UnnormedRows


class LinearKind(Enum):
    """How a linear is split over ranks."""

    COLUMN = "column"  # each rank holds some outputs of every part
    ROW = "row"  # each rank holds some inputs; the outputs are summed over ranks
    REPLICATED = "replicated"  # each rank holds the whole weight


_SHARD_AXES = {LinearKind.COLUMN: 0, LinearKind.ROW: 1, LinearKind.REPLICATED: None}


class LinearAdapter(Protocol):
    """An adapter that is attached to a linear, for example LoRA."""

    def __call__(self, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """x [..., I], output [..., O] -> the output to use; may write to `output`."""
        ...


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """The place in a model that one tensor of the checkpoint is loaded into."""

    #: The shape of the whole tensor.
    shape: tuple[int, ...]
    #: load(first_row, rows) stores rows [first_row, first_row + R), which have any floating dtype
    #: and are valid only during the call. Each row is passed once, in any order, and several
    #: threads may call at the same time.
    load: Callable[[int, torch.Tensor], None]
    #: Like `load`, for block-quantized rows; None if the weight must be dequantized.
    load_quantized: Callable[[int, BlockQuantizedRows], None] | None = None
    #: The linear, and the index of its fused part (q, k, v) that the tensor fills; None if the
    #: tensor is not a linear's weight.
    part: "tuple[Linear, int] | None" = None


class AdapterHalf(Enum):
    """One of the two factors of an adapter B A."""

    A = "a"
    B = "b"


@dataclass(frozen=True, slots=True, eq=False)
class SharedHalf:
    """A factor (A or B) that the adapters of several linears share; one linear stores it."""

    #: The linear whose adapter slots store the shared factor.
    linear: "Linear"
    half: AdapterHalf


class SlottedModule(nn.Module, ABC):
    """A module of several linears with its own mapping from checkpoint tensors to slots."""

    @abstractmethod
    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        """The slots by tensor names, relative to the parent module."""


_is_deferred: ContextVar[bool] = ContextVar("_is_deferred", default=False)


@contextmanager
def without_weights() -> Iterator[None]:
    """Linears created inside the `with` have no memory until `Linear.use` is called.

    Weights that will be quantized might not fit on a GPU in their original dtype.
    """
    token = _is_deferred.set(True)
    try:
        yield
    finally:
        _is_deferred.reset(token)


class Linear(LinearModule):
    """A linear of a model. `LinearModule` explains sizes and parts."""

    #: Whether the weights are never quantized, as in routers, whose choice of experts is too
    #: sensitive.
    stays_dense = False
    #: Whether the containing module, not the method of this ROW linear, sums over ranks.
    is_summed_later = False

    def __init__(
        self,
        input_size: int,
        part_sizes: tuple[int, ...],
        kind: LinearKind,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        gated: bool = False,
    ) -> None:
        super().__init__(input_size, part_sizes, has_bias=bias, gated=gated)
        self.kind = kind
        #: Whether the CPU stores and multiplies the weights, while another device computes the rest
        #: of the model; set by `layers.experts.Experts.place_on_host`.
        self.is_on_host = False
        #: The axis of the weight [O, I] that is split over ranks; None if it is not split.
        self.shard_axis = _SHARD_AXES[kind]
        self.adapter: LinearAdapter | None = None
        #: The factor of the adapters that another linear stores; None if this linear stores both
        #: factors.
        self.shared_half: SharedHalf | None = None
        self.method: LinearMethod = DenseMethod()
        own_device = torch.device("meta") if _is_deferred.get() else device
        self.method.create(self, bias, dtype, own_device)

    def use(self, method: LinearMethod, dtype: torch.dtype, device: torch.device) -> None:
        """Replace the method and its parameters, before the checkpoint is read."""
        self._parameters.clear()
        self.state = None
        self.method = method
        method.create(self, self.has_bias, dtype, device)

    def slots(self) -> dict[tuple[str, int], WeightSlot]:
        """The slots of the checkpoint's tensors by (name, part)."""
        return {key: self._slot(*key, shape) for key, shape in self.method.tensors(self).items()}

    def _slot(self, parameter: str, index: int, shape: tuple[int, ...]) -> WeightSlot:
        method = self.method
        load = partial(method.load_part, self, parameter, index)
        if parameter != "weight":
            return WeightSlot(shape, load)
        load_quantized = partial(method.load_quantized, self, index)
        takes_quantized = method.takes_quantized(index)
        return WeightSlot(shape, load, load_quantized if takes_quantized else None, (self, index))

    def finish(self) -> None:
        """Must be called after all slots are filled and before the first use."""
        self.method.finish(self)

    def takes_unnormed(self, x: torch.Tensor) -> bool:
        """Whether the linear can norm rows x [T, I] before it multiplies them."""
        return self.adapter is None and self.method.takes_unnormed(self, x)

    def read(self, x: torch.Tensor | UnnormedRows) -> torch.Tensor:
        """The product of x, or of the norm of unnormed rows, [T, I] -> [T, O]."""
        if isinstance(x, UnnormedRows):
            assert not self.gated, "a gated linear activates the product of unnormed rows"
            return self.method.apply_unnormed(self, x)
        output: torch.Tensor = self(x)
        return output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., I] -> [..., O]."""
        output = self.method.apply(self, x)
        return output if self.adapter is None else self.adapter(x, output)

    def silu_mul(self, x: torch.Tensor | UnnormedRows) -> torch.Tensor:
        """x [..., I] -> silu(gate) * up [..., O/2], for gated linears.

        An adapter is applied before the activation, as in `forward`.
        """
        assert self.gated
        if isinstance(x, UnnormedRows):
            return self.method.apply_unnormed(self, x)
        if self.adapter is None:
            return self.method.silu_mul(self, x)
        return self.method.gate(self.forward(x))
