"""The interface of a weight format (dense, INT8, INT4), and its view of a linear.

    WeightFormat   named in registry.py; chooses the method for the available kernels
    LinearMethod   stores, fills and multiplies; one object serves many linears
    LinearModule   a linear as its method sees it: its sizes, and a place for its parameters

This module knows no layers, ranks or checkpoints: `layers.linear` has the linear that models are
made of, `layers.sharded` wraps methods for several ranks, and `models.checkpoints.loader` loads the
tensors.

Shapes: ... any leading dimensions, I input size, O output size (the sum of the parts).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from quire.formats.block_quantized.weights import BlockQuantizedRows
from quire.kernels.activations import Gating, gated
from quire.kernels.cpu.adapters.packed_adapters import PackedAdapters
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.experts import mix_experts
from quire.kernels.operators import Operators, RowTable
from quire.kernels.routing import Routing
from quire.kernels.unnormed_rows import UnnormedRows

Shape = tuple[int, ...]


class LinearModule(nn.Module):
    """A linear y = x W^T + b, which may fuse parts (q, k, v; gate, up) along its outputs."""

    #: Parameters of dense methods. Other methods register other parameters.
    weight: torch.Tensor
    bias: torch.Tensor | None

    #: Number of outputs of each part; a linear that is not fused has one part.
    part_sizes: tuple[int, ...]

    #: Whether the parts are gate and up of a gated MLP, for `LinearMethod.silu_mul`.
    gated: bool

    #: Data that the method stores in addition to parameters.
    state: object

    #: LoRA adapters that the native kernels add to the output; other kernels ignore them.
    packed_adapters: PackedAdapters | None

    #: Whether inputs may be wide (`WideInputsMethod`). False for linears that one call multiplies
    #: together, since the call has one list of wide inputs.
    may_have_wide: bool

    def __init__(
        self, input_size: int, part_sizes: tuple[int, ...], *, has_bias: bool, gated: bool = False
    ) -> None:
        super().__init__()
        assert not gated or (len(part_sizes) == 2 and part_sizes[0] == part_sizes[1]), part_sizes
        self.input_size = input_size
        self.part_sizes = part_sizes
        self.output_size = sum(part_sizes)
        self.has_bias = has_bias
        self.gated = gated
        self.state = None
        self.packed_adapters = None
        self.may_have_wide = True

    def part_start(self, index: int) -> int:
        """The first output of part `index`."""
        return sum(self.part_sizes[:index])


@dataclass(slots=True, eq=False)
class ExpertLinears:
    """All experts of a layer, as a linear method sees them: gated MLPs of equal sizes."""

    #: The gated linear of each expert.
    gate_up: tuple[LinearModule, ...]

    down: tuple[LinearModule, ...]
    gating: Gating

    #: Data that the method stores for all experts together.
    state: object = None


class LinearMethod(ABC):
    """How a linear stores and multiplies its weights. One object may serve many linears."""

    @property
    def is_exact(self) -> bool:
        """Whether weights are stored without rounding. A tied weight is then stored once."""
        return True

    @property
    def storage(self) -> "LinearMethod":
        """The method that stores the weights: `self`, or the method that `self` wraps."""
        return self

    def takes_quantized(self, index: int) -> bool:
        """Whether the weight of part `index` is loaded by `load_quantized`, not by `load_part`."""
        return False

    @property
    def groups_experts(self) -> bool:
        """Whether `experts` multiplies all experts at once. If not, it waits for the device, which
        a step on a GPU must not do."""
        return False

    def takes_experts_with(self, down: "LinearMethod") -> bool:
        """Whether `experts` works for gate_up linears of this method and down linears of the
        method `down`."""
        return down is self

    @abstractmethod
    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
        """Bytes of a weight of this size in a model of this dtype, its scales included."""

    @abstractmethod
    def create(
        self, linear: LinearModule, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate the linear's parameters, uninitialised: the checkpoint fills them."""

    def tensors(self, linear: LinearModule) -> dict[tuple[str, int], Shape]:
        """The shapes of the linear's tensors in a checkpoint, by (name, part).

        Where several ranks share a model, each rank has a linear of its shard's size. The axis
        along which a tensor is split is the one in which the shard's tensor is smaller than the
        whole tensor.
        """
        sizes = [*enumerate(linear.part_sizes)]
        shapes: dict[tuple[str, int], Shape]
        shapes = {("weight", index): (size, linear.input_size) for index, size in sizes}
        if linear.has_bias:
            shapes |= {("bias", index): (size,) for index, size in sizes}
        return shapes

    @abstractmethod
    def load_part(
        self, linear: LinearModule, parameter: str, index: int, first_row: int, rows: torch.Tensor
    ) -> None:
        """Store rows [first_row, first_row + R) of the tensor `parameter` of part `index`.

        Rows are valid only during the call, and have any floating dtype. Each row is passed once,
        in any order; several threads may load different rows at the same time.
        """

    def load_quantized(
        self, linear: LinearModule, index: int, first_row: int, rows: BlockQuantizedRows
    ) -> None:
        """Like `load_part` for the weight, if `takes_quantized` is true."""
        raise NotImplementedError

    def finish(self, linear: LinearModule) -> None:  # noqa: B027  # most have nothing to do
        """Must be called after all parts are loaded."""

    @abstractmethod
    def apply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """x [..., I] -> [..., O]. `out_dtype` is x's dtype or fp32; None means x's dtype. An fp32
        result need not be rounded to x's dtype first."""

    def silu_mul(self, linear: LinearModule, x: torch.Tensor) -> torch.Tensor:
        """x [..., I] -> silu(gate) * up [..., O/2], for a gated linear."""
        return self.gate(self.apply(linear, x))

    def takes_unnormed(self, linear: LinearModule, x: torch.Tensor) -> bool:
        """Whether `apply_unnormed` serves rows x [T, I]."""
        return False

    def apply_unnormed(self, linear: LinearModule, rows: UnnormedRows) -> torch.Tensor:
        """rows [T, I] -> [T, O] of their norm, or silu(gate) * up [T, O/2] for a gated linear."""
        raise NotImplementedError

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [..., O], the output of `apply` after adapters were added -> silu(gate) * up
        [..., O/2], with the roundings of `Operators.gated`."""
        return gated(gate_up, Gating())

    def heads(self, linears: Sequence[LinearModule], x: torch.Tensor) -> torch.Tensor:
        """x [T, H, I] -> [T, H, O]: linears[h] multiplies head h."""
        return torch.stack([self.apply(each, x[:, at]) for at, each in enumerate(linears)], dim=1)

    def experts(self, layer: ExpertLinears, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """x [T, H] -> [T, H], the weighted sum of each token's experts, as in `kernels.experts`.
        All gate_up are stored by this method's `storage`, and all down by a method that
        `takes_experts_with` accepts."""

        def compute(expert: int, rows: torch.Tensor) -> torch.Tensor:
            gate_up = layer.gate_up[expert]
            if layer.gating == Gating():
                inner = self.silu_mul(gate_up, rows)
            else:
                inner = gated(self.apply(gate_up, rows), layer.gating)
            return self.apply(layer.down[expert], inner)

        return mix_experts(x, routing, compute)

    def tie(self, linear: LinearModule, table: nn.Parameter) -> RowTable | None:
        """Share one weight between the linear, an output head, and an embedding with the parameter
        `table` [O, I]. Called after `create`. If the linear stores the weight, returns the source
        from which the embedding reads rows. Returns None if `table` is the shared weight, which the
        embedding's slot fills."""
        return None


class SampledMethod(LinearMethod):
    """A method that may look at a sample of the weight to choose how to store it."""

    @property
    @abstractmethod
    def wants_sample(self) -> bool:
        """Whether `take_sample` must be called before rows are loaded."""

    @abstractmethod
    def take_sample(self, linear: LinearModule, sample: torch.Tensor) -> None:
        """sample [any, I]: rows of the whole weight, spread over its outputs. All ranks that share
        the outputs get the same sample."""


class CompensatedMethod(LinearMethod):
    """A method that may round weights so that errors cancel for typical inputs.

    The linear is filled twice: first by plain rounding, so that the model can run and its inputs
    can be measured, then with `use_feedback`.
    """

    @abstractmethod
    def can_compensate(self, linear: LinearModule) -> bool:
        """Whether `use_feedback` may be called for this linear."""

    @abstractmethod
    def use_feedback(self, linear: LinearModule, feedback: torch.Tensor) -> None:
        """Round rows that are loaded later with `feedback`, until `finish` drops it. `feedback` is
        a result of `kernels.compensation.error_feedback`, on the device of the weights."""


class WideInputsMethod(LinearMethod):
    """A method that rounds activations, but may multiply a linear's widest inputs unrounded.

    In every token of real models, some inputs are a hundred times as large as the others, and would
    take all but a few levels from the inputs with which they share a scale.
    """

    @abstractmethod
    def num_wide(self, linear: LinearModule) -> int:
        """How many of the linear's inputs `set_wide_inputs` takes. If 0, it must not be called."""

    @abstractmethod
    def wide_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """Bytes that `set_wide_inputs` adds to `num_bytes` for a weight of this size."""

    @abstractmethod
    def set_wide_inputs(self, linear: LinearModule, inputs: torch.Tensor) -> None:
        """Multiply `inputs` [num_wide] int32, in rising order, unrounded from now on. The linear is
        loaded."""


@dataclass(frozen=True, slots=True)
class TritonLinears:
    """Settings shared by the Triton methods of an engine."""

    #: The operators that compute the activation after a gated linear.
    operators: Operators

    #: Whether a row's result is the same in any batch, to the bit.
    batch_invariant: bool


class WeightFormat(ABC):
    """A way to store the weights of a model's linears, with a method for each kind of kernels.

    The torch method defines the results of the other methods, and is used if there are no kernels.
    """

    def why_not(self, dtype: torch.dtype, device: torch.device) -> str | None:
        """The reason why a model of this dtype can't be served in this format on this device, to
        complete "quantization is 'name', but ..."; None if it can be served."""
        return None

    @abstractmethod
    def torch_method(self) -> LinearMethod:
        """The method that multiplies by torch, on any device."""

    def native_method(self, kernels: NativeKernels) -> LinearMethod:
        """The method that multiplies by the native kernels of the CPU."""
        return self.torch_method()

    def triton_method(self, linears: TritonLinears) -> LinearMethod:
        """The method that multiplies by Triton kernels."""
        return self.torch_method()

    def head_method(
        self, native: NativeKernels | None = None, triton: TritonLinears | None = None
    ) -> LinearMethod:
        """Like `method`, for the vocabulary projection, whose rounding errors reach the logits
        directly."""
        return self.method(native, triton)

    def method(
        self, native: NativeKernels | None = None, triton: TritonLinears | None = None
    ) -> LinearMethod:
        """The method for the given kernels, at most one of the two; torch's if both are None."""
        if triton is not None:
            return self.triton_method(triton)
        return self.torch_method() if native is None else self.native_method(native)


def register_bias(
    linear: LinearModule, bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Register the parameter `bias` [O], uninitialised; as None if the linear has no bias."""
    parameter = empty_parameter((linear.output_size,), dtype, device) if bias else None
    linear.register_parameter("bias", parameter)


def empty_parameter(shape: Shape, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Allocate a parameter, which is not initialised and never trained."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
