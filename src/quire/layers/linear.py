"""Linear layers: what they are is declared here, how they are computed is applied from outside.

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
from torch.nn import functional

from quire.kernels.operators import TORCH_OPERATORS, Operators
from quire.kernels.silu_mul import silu_mul


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


class RowSource(Protocol):
    """Weights of which single rows can be had back, exactly as the checkpoint had them."""

    def unpack(self, outputs: torch.Tensor) -> torch.Tensor:
        """outputs [R] int64, each below O -> [R, I] in the model's dtype."""
        ...


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """The place of one of the checkpoint's tensors.

    shape: of the whole tensor. load(first_row, rows): takes its rows [first_row, first_row + R),
    of any floating dtype and valid during the call only. Rows come in any order, each once, and
    different ones from several threads at a time.
    """

    shape: tuple[int, ...]
    load: Callable[[int, torch.Tensor], None]


class LinearMethod(ABC):
    """How a linear stores and multiplies its weights. One object may serve many linears."""

    @property
    def is_exact(self) -> bool:
        """Whether weights keep all of the model's bits; a tied one is then stored once."""
        return True

    @abstractmethod
    def create(
        self, linear: "Linear", bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Make room for the linear's parameters, uninitialised: the checkpoint fills them."""

    @abstractmethod
    def load_part(
        self, linear: "Linear", parameter: str, index: int, first_row: int, rows: torch.Tensor
    ) -> None:
        """Take rows of part `index` of "weight" [part size, I] or "bias" [part size].

        Calls are as `WeightSlot` says.
        """

    def finish(self, linear: "Linear") -> None:  # noqa: B027  # most have nothing to do
        """Do what remains once all parts are loaded."""

    @abstractmethod
    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
        """What a weight of this size takes in a model of this dtype."""

    @abstractmethod
    def apply(
        self, linear: "Linear", x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """x [..., I] -> [..., O]. out_dtype: x's, or fp32, which may be had without rounding to x's
        first; None: x's."""

    def silu_mul(self, linear: "Linear", x: torch.Tensor) -> torch.Tensor:
        """x [..., I] -> silu(gate) * up [..., O/2], for a gated linear."""
        return silu_mul(self.apply(linear, x))

    def tie(self, linear: "Linear", table: nn.Parameter) -> RowSource | None:
        """The linear's weight is the embedding's, `table` [O, I], filled as that; called after
        `create`. Returns where the embedding finds its rows instead, so that they are there once;
        None: in `table`, which stays."""
        return None


class DenseMethod(LinearMethod):
    """weight [O, I] and bias [O] in the model's dtype, multiplied by torch.

    operators: compute what follows a gated linear.
    """

    def __init__(self, operators: Operators = TORCH_OPERATORS) -> None:
        self._operators = operators

    def create(
        self, linear: "Linear", bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        linear.register_parameter(
            "weight", empty_parameter((linear.output_size, linear.input_size), dtype, device)
        )
        linear.register_parameter(
            "bias", empty_parameter((linear.output_size,), dtype, device) if bias else None
        )

    def load_part(
        self, linear: "Linear", parameter: str, index: int, first_row: int, rows: torch.Tensor
    ) -> None:
        start = linear.part_start(index) + first_row
        linear.get_parameter(parameter)[start : start + len(rows)].copy_(rows)

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
        return num_outputs * num_inputs * dtype.itemsize

    def apply(
        self, linear: "Linear", x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        output = functional.linear(x, linear.weight, linear.bias)
        return output if out_dtype is None else output.to(out_dtype)

    def silu_mul(self, linear: "Linear", x: torch.Tensor) -> torch.Tensor:
        return self._operators.silu_mul(self.apply(linear, x))

    def tie(self, linear: "Linear", table: nn.Parameter) -> RowSource | None:
        linear.weight = table
        return None


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


class Linear(nn.Module):
    """y = x W^T + b, fused of parts that lie one after the other in the output.

    part_sizes: outputs of each part; one for a linear that is not fused.
    gated: the parts are gate and up of a SwiGLU MLP, and are wanted as `silu_mul`.
    shard_axis: the axis of the weight [O, I] that is split over ranks; None: it is not split.
    adapter: adds to the output when one is attached.
    state: what the method keeps of this linear beside parameters.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

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
        super().__init__()
        assert not gated or (len(part_sizes) == 2 and part_sizes[0] == part_sizes[1]), part_sizes
        self.input_size = input_size
        self.part_sizes = part_sizes
        self.output_size = sum(part_sizes)
        self.kind = kind
        self.has_bias = bias
        self.gated = gated
        self.shard_axis = _SHARD_AXES[kind]
        self.adapter: LinearAdapter | None = None
        self.state: object = None
        self.method: LinearMethod = DenseMethod()
        own_device = torch.device("meta") if _is_deferred.get() else device
        self.method.create(self, bias, dtype, own_device)

    def use(self, method: LinearMethod, dtype: torch.dtype, device: torch.device) -> None:
        """Let `method` take over, before the checkpoint is read: its parameters replace ours."""
        self._parameters.clear()
        self.state = None
        self.method = method
        method.create(self, self.has_bias, dtype, device)

    def part_start(self, index: int) -> int:
        """The first output of part `index`."""
        return sum(self.part_sizes[:index])

    def slots(self) -> dict[tuple[str, int], WeightSlot]:
        """(parameter, part) -> the place of that tensor of the checkpoint."""
        shapes = {("weight", i): (size, self.input_size) for i, size in enumerate(self.part_sizes)}
        biases = {("bias", i): (size,) for i, size in enumerate(self.part_sizes)}
        return {
            key: WeightSlot(shape, partial(self.method.load_part, self, *key))
            for key, shape in (shapes | (biases if self.has_bias else {})).items()
        }

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
        return self.method.silu_mul(self, x) if self.adapter is None else silu_mul(self.forward(x))


def empty_parameter(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> nn.Parameter:
    """A parameter that is allocated, never initialised and never trained."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
