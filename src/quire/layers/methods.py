"""Which method each linear of a model gets, by the kernels that are there and what is asked for.

`quantization` names one of SCHEMES. What stays in the model's dtype under each of them: norms,
biases and the embedding's table, of which a token reads a single row. The vocabulary projection has
the bits of the other linears: under int4 it is half of the loss in quality (0.7 of 1.6%; embedded
model), and of a small model with a large vocabulary a quarter of the bytes of a step.

Called by `engine.build`.
"""

from dataclasses import dataclass
from typing import Protocol

from quire.kernels.cpu.abi import WeightLayout
from quire.kernels.cpu.library import NativeKernels
from quire.layers.embedding import LMHead
from quire.layers.linear import DenseMethod, Linear, LinearMethod
from quire.layers.packed_linear import PackedMethod
from quire.layers.quantized_torch import Int4TorchMethod, Int8TorchMethod
from quire.layers.sharded import Sharding

INT4_GROUP_SIZE = 32


@dataclass(frozen=True, slots=True)
class Scheme:
    """Formats of the layers' linears, and of the vocabulary projection."""

    body: WeightLayout
    head: WeightLayout


SCHEMES = {
    "int8": Scheme(WeightLayout.INT8, WeightLayout.INT8),
    "int4": Scheme(WeightLayout.INT4, WeightLayout.INT4),
}


@dataclass(frozen=True, slots=True)
class LinearMethods:
    """Methods of the layers' linears, and of the vocabulary projection.

    sharding: where each of several ranks has a share of the model.
    """

    body: LinearMethod
    head: LinearMethod
    sharding: Sharding | None = None

    def of(self, linear: Linear) -> LinearMethod:
        """The method for this one."""
        method = self.head if isinstance(linear, LMHead) else self.body
        return method if self.sharding is None else self.sharding.wrap(linear, method)


class LinearFamily(Protocol):
    """Methods of one device, by the format of the weights: `triton_linear.TritonLinears`."""

    def dense(self) -> LinearMethod: ...

    def int8(self) -> LinearMethod: ...

    def int4(self, group_size: int) -> LinearMethod: ...


def choose_methods(
    kernels: NativeKernels | None, quantization: str | None, gpu: LinearFamily | None = None
) -> LinearMethods:
    """kernels: None: torch's. quantization: a key of SCHEMES; None: the model's own dtype. gpu: its
    methods, where the model runs on one."""
    if quantization is None:
        method = _dense_method(kernels, gpu)
        return LinearMethods(method, method)
    scheme = SCHEMES[quantization]
    return LinearMethods(_method(kernels, gpu, scheme.body), _method(kernels, gpu, scheme.head))


def _dense_method(kernels: NativeKernels | None, gpu: LinearFamily | None) -> LinearMethod:
    if gpu is not None:
        return gpu.dense()
    return DenseMethod() if kernels is None else PackedMethod(kernels)


def _method(
    kernels: NativeKernels | None, gpu: LinearFamily | None, weight_format: WeightLayout
) -> LinearMethod:
    group_size = INT4_GROUP_SIZE if weight_format is WeightLayout.INT4 else 0
    if gpu is not None:
        return gpu.int4(group_size) if group_size else gpu.int8()
    if kernels is not None:
        return PackedMethod(kernels, weight_format, group_size)
    return Int4TorchMethod(group_size) if group_size else Int8TorchMethod()
