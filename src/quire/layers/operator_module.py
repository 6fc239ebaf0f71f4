"""Base classes of modules that compute with replaceable operators and recurrent states."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from quire.formats.block_quantized.linear_methods import RecordedPartsMethod, packed_parts
from quire.formats.packed import RecordedMethod, is_packed
from quire.formats.weight_format import LinearMethod
from quire.kernels.cpu.recorded_values import UnrecordableError
from quire.kernels.cpu.recorder import Recorder
from quire.kernels.operators import TORCH_OPERATORS, Operators
from quire.kernels.state_calls import StateCalls
from quire.layers.linear import Linear


class OperatorModule(nn.Module):
    """A module that computes with `operators`, which are torch's until they are replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Operators = TORCH_OPERATORS
        #: Whether the CPU computes the module for a model on another device.
        self.is_on_host = False


class NormReader(OperatorModule, ABC):
    """A module that reads the norm of the residual stream, and may accept `UnnormedRows`."""

    @property
    @abstractmethod
    def input_linear(self) -> Linear | None:
        """The linear that alone reads the input; None if the input must be normed."""


class RecurrentModule(nn.Module):
    """A layer with a state for each sequence. `layer` is its index in `recurrent_specs`."""

    #: Updates the states in the planned step; set by `TextModel.use_states`.
    states: StateCalls

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer


def use_operators(model: nn.Module, operators: Operators) -> None:
    """Replace the operators of all the model's modules on the model's device. Linears keep their
    methods."""
    for module in model.modules():
        if isinstance(module, OperatorModule) and not module.is_on_host:
            module.operators = operators


def place_on_host(layer: nn.Module) -> None:
    """Let the CPU store and compute a whole layer, before its linears get methods. Parameters keep
    their values."""
    cpu = torch.device("cpu")
    for module in layer.modules():
        if isinstance(module, Linear | OperatorModule):
            module.is_on_host = True
        for name, tensor in module._parameters.items():
            if tensor is not None and not tensor.is_meta:
                module._parameters[name] = nn.Parameter(tensor.to(cpu), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(cpu)


@contextmanager
def recorded_by(recorder: Recorder, model: nn.Module) -> Iterator[None]:
    """Until the `with` ends, operators, states and linear methods are replaced by ones that note
    calls in the recorder.

    Raises UnrecordableError if a linear has an adapter, which torch adds outside the linear's
    method.
    """
    if any(isinstance(each, Linear) and each.adapter is not None for each in model.modules()):
        raise UnrecordableError("torch adds the adapters of a linear")
    modules = [module for module in model.modules() if isinstance(module, OperatorModule)]
    linears = _recordable(model, recorder)
    recurrent = [module for module in model.modules() if isinstance(module, RecurrentModule)]
    states = [module.states for module in recurrent]
    operators = [module.operators for module in modules]
    methods = {linear: linear.method for linear in linears}
    try:
        use_operators(model, recorder)
        for layer in recurrent:
            layer.states = recorder
        for linear, recorded in linears.items():
            linear.method = recorded
        with recorder.recording():
            yield
    finally:
        for module, before in zip(modules, operators, strict=True):
            module.operators = before
        for layer, moved in zip(recurrent, states, strict=True):
            layer.states = moved
        for linear, method in methods.items():
            linear.method = method


def _recordable(model: nn.Module, recorder: Recorder) -> dict[Linear, LinearMethod]:
    """A method that records the product, for each linear that native kernels multiply."""
    whole, parts = RecordedMethod(recorder), RecordedPartsMethod(recorder)
    found: dict[Linear, LinearMethod] = {}
    for each in model.modules():
        if isinstance(each, Linear) and (is_packed(each) or packed_parts(each)):
            found[each] = whole if is_packed(each) else parts
    return found
