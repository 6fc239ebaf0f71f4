"""How the hidden states of a step are computed: module by module, or as one native program.

Called by `model_runner.py`. Both ways compute the same model, whichever the kernels allow; a third,
`graphs.py`, replays the first.

Legend: T tokens of the step, H hidden size.
"""

from typing import Protocol

import torch

from quire.attention.interface import AttentionBackend
from quire.kernels.cpu import abi
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.cpu.program import Program, ProgramBuilder
from quire.models.interface import CausalLM
from quire.runtime.batch import StepBatch


class Forward(Protocol):
    """Runs all layers over a step's tokens."""

    def plan(self, step: StepBatch) -> None:
        """What attention does once a step, before the call."""
        ...

    def __call__(self, step: StepBatch) -> torch.Tensor:
        """The hidden states [T, H] after the final norm, valid until the next call."""
        ...


class ModuleForward:
    """Calls the model's modules, on any device."""

    def __init__(self, model: CausalLM, backend: AttentionBackend) -> None:
        self._model = model
        self._backend = backend

    def plan(self, step: StepBatch) -> None:
        self._backend.plan(step.attention)

    def __call__(self, step: StepBatch) -> torch.Tensor:
        hidden: torch.Tensor = self._model(step.token_ids, step.positions, self._backend.run).hidden
        return hidden


class NativeForward:
    """Runs the program that the model lowers itself to: one call for all layers."""

    def __init__(self, program: Program, backend: AttentionBackend, native: abi.Step) -> None:
        """native: the step that `backend` plans."""
        self._program = program
        self._backend = backend
        self._native = native

    def plan(self, step: StepBatch) -> None:
        self._backend.plan(step.attention)

    def __call__(self, step: StepBatch) -> torch.Tensor:
        native = self._native
        native.token_ids = step.token_ids.data_ptr()
        native.positions = step.positions.data_ptr()
        return self._program.run(native)


def make_forward(
    model: CausalLM,
    backend: AttentionBackend,
    kernels: NativeKernels | None,
    max_num_tokens: int,
) -> Forward:
    """The native program where there are kernels for all of it, else module by module.

    backend: bound. max_num_tokens: the most that a step computes.
    """
    attention = backend.native
    if kernels is None or attention is None:
        return ModuleForward(model, backend)
    dtype = next(model.parameters()).dtype
    builder = ProgramBuilder(kernels, dtype, max_num_tokens, attention.layers)
    output = model.lower(builder)
    if output is None:
        return ModuleForward(model, backend)
    return NativeForward(builder.finish(output), backend, attention.step)
