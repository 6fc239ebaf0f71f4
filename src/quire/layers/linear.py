"""Linear layers, declared here; methods that compute them are applied later.

A `Linear` says how it may be sharded (kind, shard axis) and of which parts it is fused; a
`LinearMethod` owns its parameters and its arithmetic; a `LinearAdapter` may add to its output.
Model files name neither of the latter, so quantization, tensor parallelism and LoRA need no change
there.

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

from quire.formats.codes import CodedRows
from quire.formats.dense import DenseMethod
from quire.formats.weight_format import LinearMethod, LinearModule


class LinearKind(Enum):
    """How a linear is split over ranks."""

    COLUMN = "column"  # each rank holds some outputs of every part
    ROW = "row"  # each rank holds some inputs; the outputs are summed over ranks
    REPLICATED = "replicated"  # each rank holds all of it


_SHARD_AXES = {LinearKind.COLUMN: 0, LinearKind.ROW: 1, LinearKind.REPLICATED: None}


class LinearAdapter(Protocol):
    """What sits in a linear's adapter slot, LoRA for one."""

    def __call__(self, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """x [..., I], output [..., O] -> the output to use; may write to `output`."""
        ...


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """The place of one of the checkpoint's tensors.

    shape: of the whole tensor. load(first_row, rows): takes its rows [first_row, first_row + R),
    of any floating dtype and valid during the call only. Rows come in any order, each once, and
    different ones from several threads at a time. load_codes: the same of a weight that is kept as
    the checkpoint's codes; None: numbers are wanted. part: of a linear's weight, which linear's and
    which part's; None: of something else.
    """

    shape: tuple[int, ...]
    load: Callable[[int, torch.Tensor], None]
    load_codes: Callable[[int, CodedRows], None] | None = None
    part: "tuple[Linear, int] | None" = None


class AdapterHalf(Enum):
    """Of an adapter B A."""

    A = "a"
    B = "b"


@dataclass(frozen=True, slots=True, eq=False)
class SharedHalf:
    """What every adapter of a linear has in common with its part for another linear, where it is
    kept."""

    linear: "Linear"
    half: AdapterHalf


class SlottedModule(nn.Module, ABC):
    """A module of several linears that says itself which of the checkpoint's tensors fill them."""

    @abstractmethod
    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        """Names below the module that this one is in -> places."""


_is_deferred: ContextVar[bool] = ContextVar("_is_deferred", default=False)


@contextmanager
def without_weights() -> Iterator[None]:
    """Linears that are made here get no memory until `use`: on a GPU it would be taken at once, and
    weights that are going to be quantized need not fit there as they are."""
    token = _is_deferred.set(True)
    try:
        yield
    finally:
        _is_deferred.reset(token)


class Linear(LinearModule):
    """A linear of a model: sizes and parts as `LinearModule` says.

    shard_axis: the axis of the weight [O, I] that is split over ranks; None: it is not split.
    adapter: adds to the output when one is attached.
    shared_half: of its adapters, that another linear keeps; None: it keeps all itself.
    method: stores and multiplies the weights.
    stays_dense: no format rounds the weights: a router's choice is too sensitive to that.
    is_summed_later: of a ROW linear; the module that holds it sums over ranks, not its method.
    """

    stays_dense = False
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
        self.shard_axis = _SHARD_AXES[kind]
        self.adapter: LinearAdapter | None = None
        self.shared_half: SharedHalf | None = None
        self.method: LinearMethod = DenseMethod()
        own_device = torch.device("meta") if _is_deferred.get() else device
        self.method.create(self, bias, dtype, own_device)

    def use(self, method: LinearMethod, dtype: torch.dtype, device: torch.device) -> None:
        """Let `method` take over, before the checkpoint is read: its parameters replace ours."""
        self._parameters.clear()
        self.state = None
        self.method = method
        method.create(self, self.has_bias, dtype, device)

    def slots(self) -> dict[tuple[str, int], WeightSlot]:
        """(name, part) -> the place of that tensor of the checkpoint."""
        return {key: self._slot(*key, shape) for key, shape in self.method.tensors(self).items()}

    def _slot(self, parameter: str, index: int, shape: tuple[int, ...]) -> WeightSlot:
        method = self.method
        load = partial(method.load_part, self, parameter, index)
        if parameter != "weight":
            return WeightSlot(shape, load)
        load_codes = partial(method.load_codes, self, index)
        takes_codes = method.takes_codes_of(index)
        return WeightSlot(shape, load, load_codes if takes_codes else None, (self, index))

    def finish(self) -> None:
        """To be called once all slots are filled, before the first use."""
        self.method.finish(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., I] -> [..., O]."""
        output = self.method.apply(self, x)
        return output if self.adapter is None else self.adapter(x, output)

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., I] -> silu(gate) * up [..., O/2], of a gated linear. An adapter sees gate and up
        as `forward` gives them."""
        assert self.gated
        if self.adapter is None:
            return self.method.silu_mul(self, x)
        return self.method.gate(self.forward(x))
