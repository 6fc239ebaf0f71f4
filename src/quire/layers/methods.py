"""Which method each linear of a model gets, by the kernels that are there and what is asked for.

`quantization` names one of SCHEMES. What stays in the model's dtype under each of them: norms,
biases and the embedding's table, of which a token reads a single row. The vocabulary projection has
the bits of the other linears: under int4 it is half of the loss in quality (0.7 of 1.6%; embedded
model), and of a small model with a large vocabulary a quarter of the bytes of a step.

Called by `engine.build`.
"""

from dataclasses import dataclass

from quire.kernels.cpu.abi import WeightFormat
from quire.kernels.cpu.library import NativeKernels
from quire.layers.embedding import LMHead
from quire.layers.linear import DenseMethod, Linear, LinearMethod
from quire.layers.packed_linear import PackedMethod
from quire.layers.quantized_torch import Int4TorchMethod, Int8TorchMethod

INT4_GROUP_SIZE = 32


@dataclass(frozen=True, slots=True)
class Scheme:
    """Formats of the layers' linears, and of the vocabulary projection."""

    body: WeightFormat
    head: WeightFormat


SCHEMES = {
    "int8": Scheme(WeightFormat.INT8, WeightFormat.INT8),
    "int4": Scheme(WeightFormat.INT4, WeightFormat.INT4),
}


@dataclass(frozen=True, slots=True)
class LinearMethods:
    """Methods of the layers' linears, and of the vocabulary projection."""

    body: LinearMethod
    head: LinearMethod

    def of(self, linear: Linear) -> LinearMethod:
        """The method for this one."""
        return self.head if isinstance(linear, LMHead) else self.body


def choose_methods(kernels: NativeKernels | None, quantization: str | None) -> LinearMethods:
    """kernels: None: torch's. quantization: a key of SCHEMES; None: the model's own dtype."""
    if quantization is None:
        method = DenseMethod() if kernels is None else PackedMethod(kernels)
        return LinearMethods(method, method)
    scheme = SCHEMES[quantization]
    return LinearMethods(_method(kernels, scheme.body), _method(kernels, scheme.head))


def _method(kernels: NativeKernels | None, weight_format: WeightFormat) -> LinearMethod:
    group_size = INT4_GROUP_SIZE if weight_format is WeightFormat.INT4 else 0
    if kernels is not None:
        return PackedMethod(kernels, weight_format, group_size)
    return Int4TorchMethod(group_size) if group_size else Int8TorchMethod()
