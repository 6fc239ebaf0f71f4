"""Runs the model's forward pass: by its torch modules, or by a recorded native program.

The native program is recorded from the modules, and is used if native kernels exist for all its
operations. `graphs.py` replays captured calls of the modules. Called by `model_runner.py`.

Legend: T tokens of the step, R rows that need logits, H hidden size, V vocabulary size.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch

from quire.attention.interface import AttentionBackend
from quire.kernels.cpu import abi
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.cpu.program import Program
from quire.kernels.cpu.recorded_values import UnrecordableError
from quire.kernels.cpu.recorder import Recorder
from quire.layers.operator_module import recorded_by
from quire.models.interface import CausalLM, InputEmbeds, TextModel
from quire.observability.log import get_logger
from quire.recurrence.state_backend import StateBackend
from quire.runtime.batch import StepBatch

logger = get_logger(__name__)

Logits = Callable[[torch.Tensor], torch.Tensor]
"""Computes logits [R, V] fp32 of hidden states [R, H]. The caller may overwrite the result."""


class Forward(Protocol):
    """Runs all layers over a step's tokens."""

    #: Computes the logits of any rows of the hidden states.
    logits: Logits

    def plan(self, step: StepBatch) -> None:
        """Let the attention backend prepare the step, once and before the call."""
        ...

    def __call__(self, step: StepBatch) -> torch.Tensor:
        """The hidden states [T, H] after the final norm, valid until the next call."""
        ...


class ModuleForward:
    """Calls the model's modules, on any device."""

    def __init__(self, model: TextModel, backend: AttentionBackend) -> None:
        self.logits = _logits_of(model)
        self._model = model
        self._backend = backend

    def plan(self, step: StepBatch) -> None:
        if self._model.attention_specs:
            self._backend.plan(step.attention)
        if self._model.recurrence is not None:
            self._model.recurrence.plan(step.states)

    def __call__(self, step: StepBatch) -> torch.Tensor:
        hidden: torch.Tensor = self._model(
            step.token_ids, step.positions, self._backend.run, input_embeds=step.input_embeds
        )
        return hidden


class NativeForward:
    """Runs the native program that was recorded from the model: one call for all layers."""

    def __init__(
        self,
        program: Program,
        logits: Logits,
        backend: AttentionBackend,
        native: abi.Step,
        recurrence: StateBackend | None,
    ) -> None:
        """`backend` plans the step `native`. `recurrence` is None without recurrent layers."""
        self.logits = logits
        self._recurrence = recurrence
        self._program = program
        self._backend = backend
        self._native = native

    def plan(self, step: StepBatch) -> None:
        self._backend.plan(step.attention)
        if self._recurrence is not None:
            self._recurrence.plan(step.states)

    def __call__(self, step: StepBatch) -> torch.Tensor:
        native = self._native
        native.token_ids = step.token_ids.data_ptr()
        native.positions = step.positions.data_ptr()
        return self._program.run(native, step.input_embeds)


def make_forward(
    model: TextModel,
    backend: AttentionBackend,
    kernels: NativeKernels | None,
    max_num_tokens: int,
) -> Forward:
    """A native program if kernels exist for all operations; otherwise the model's modules.

    A model without attention always runs by modules. `backend` and the model's `recurrence` must be
    bound. `max_num_tokens` bounds the tokens of a step.
    """
    attention = backend.native if model.attention_specs else None
    states = None if model.recurrence is None else model.recurrence.native
    if kernels is None or attention is None or (model.recurrent_specs and states is None):
        return ModuleForward(model, backend)
    dtype = next(model.parameters()).dtype

    def new_recorder() -> Recorder:
        return Recorder(kernels, dtype, max_num_tokens, attention.layers, states)

    try:
        program = _record_hidden(model, new_recorder())
    except UnrecordableError as error:
        logger.info("the model is run module by module, which is slower: %s", error)
        return ModuleForward(model, backend)
    logits = _logits_of(model)
    if isinstance(model, CausalLM):
        # If the head can't be recorded, its modules compute the logits.
        with suppress(UnrecordableError):
            logits = _record_logits(model, new_recorder())
    return NativeForward(program, logits, backend, attention.step, model.recurrence)


def _logits_of(model: TextModel) -> Logits:
    return model.logits if isinstance(model, CausalLM) else _no_logits


def _no_logits(hidden: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the model predicts no tokens, but a row samples one")


def _record_hidden(model: TextModel, recorder: Recorder) -> Program:
    with recorded_by(recorder, model):
        embeds = InputEmbeds(*recorder.put(model.hidden_size * model.num_embed_parts))
        hidden = model(*recorder.inputs, recorder.attend, input_embeds=embeds)
        return recorder.finish(hidden)


def _record_logits(model: CausalLM, recorder: Recorder) -> Logits:
    with recorded_by(recorder, model):
        rows = recorder.rows(model.hidden_size)
        return recorder.finish_rows([rows], model.logits(rows)).run
