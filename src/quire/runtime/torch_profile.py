"""Records an engine's steps with torch's profiler, as a trace for Chrome or Perfetto.

The trace has each operator of torch and each kernel of a GPU. The CPU's native kernels run a whole
step in one call, so the trace shows only the step. Called by `offline`.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import profiler

from quire.core.checked_fields import CheckedFields, answers_mistakes
from quire.core.sampling_checks import flag, integer
from quire.errors import InvalidRequestError, shown

_ONE = "torch's profiler is the only one"


def _torch_alone(value: Any) -> str:
    if value != "torch":
        raise InvalidRequestError(f"profiler is {shown(value)}, but must be 'torch'", "profiler")
    return str(value)


def _folder(value: Any) -> str:
    if not isinstance(value, (str, Path)) or not str(value):
        raise InvalidRequestError(
            f"torch_profiler_dir is {shown(value)}, but must be a folder for traces",
            "torch_profiler_dir",
        )
    return str(value)


_SWITCHES = ("with_stack", "record_shapes", "with_memory", "with_flops", "use_gzip")


@answers_mistakes
@dataclass(slots=True, kw_only=True)
class ProfilerSettings(CheckedFields):
    """The settings of a recording, with the names of vLLM's ProfilerConfig.

    `torch.profiler.profile` explains the switches that are not explained here.
    """

    checks: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        "torch_profiler_dir": _folder,
        "profiler": _torch_alone,
        **{f"torch_profiler_{each}": partial(flag, f"torch_profiler_{each}") for each in _SWITCHES},
        "delay_iterations": partial(
            integer, "delay_iterations", low=0, high=None, is_optional=False
        ),
        "max_iterations": partial(integer, "max_iterations", low=0, high=None, is_optional=False),
    }
    foreign: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "ignore_frontend": ((False, True), "engine and caller are one process here"),
        "proton_profiler_dir": (("",), _ONE),
        "torch_profiler_activities": ((), "the CPU is recorded, and a GPU where there is one"),
        "torch_profiler_dump_cuda_time_total": ((False, True), "the trace has all times"),
        "wait_iterations": ((0,), "delay_iterations skips steps"),
        "warmup_iterations": ((0,), "delay_iterations skips steps"),
    }

    #: The folder for traces, which is created if it does not exist.
    torch_profiler_dir: str
    profiler: str = "torch"
    torch_profiler_with_stack: bool = True
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False
    torch_profiler_with_flops: bool = False
    #: Whether the trace file is compressed.
    torch_profiler_use_gzip: bool = True
    #: The number of steps to skip before the recording.
    delay_iterations: int = 0
    #: The number of steps to record; 0 records all steps until the end.
    max_iterations: int = 0


class TorchProfile:
    """One recording, from `start` to `stop`. `on_step` must be called when a step begins.

    If several threads run steps, the profiler may miss the steps of some threads.
    """

    def __init__(self, settings: ProfilerSettings, prefix: str = "quire") -> None:
        """`prefix` is the beginning of the file's name."""
        self._settings = settings
        self._prefix = prefix
        self._num_steps = 0
        self._profiler: profiler.profile | None = None
        self._is_recording = False
        self._step: AbstractContextManager[Any] | None = None

    def start(self) -> None:
        """Begin recording now, or after the steps that are to be skipped."""
        if not self._settings.delay_iterations:
            self._record()

    def on_step(self, *_: object) -> None:
        """Note that a step begins and the previous step has ended."""
        settings = self._settings
        self._end_step()
        if self._num_steps == settings.delay_iterations and not self._is_recording:
            self._record()
        if settings.max_iterations and self._num_recorded >= settings.max_iterations:
            self._pause()
        if self._is_recording:
            step: AbstractContextManager[Any] = profiler.record_function(f"step {self._num_steps}")
            step.__enter__()
            self._step = step
        self._num_steps += 1

    def stop(self) -> Path:
        """End the recording and write the trace. Returns the file's path.

        Raises InvalidRequestError if no step was recorded.
        """
        self._end_step()
        self._pause()
        if self._profiler is None:
            raise InvalidRequestError(
                f"{self._num_steps} steps have run, and delay_iterations is"
                f" {self._settings.delay_iterations}: nothing was recorded"
            )
        folder = Path(self._settings.torch_profiler_dir).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        suffix = ".pt.trace.json" + (".gz" if self._settings.torch_profiler_use_gzip else "")
        path = folder / f"{self._prefix}.{time.time_ns()}{suffix}"
        self._profiler.export_chrome_trace(str(path))
        return path

    @property
    def _num_recorded(self) -> int:
        return self._num_steps - self._settings.delay_iterations

    def _record(self) -> None:
        settings = self._settings
        activities = [profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(profiler.ProfilerActivity.CUDA)
        self._profiler = profiler.profile(
            activities=activities,
            with_stack=settings.torch_profiler_with_stack,
            record_shapes=settings.torch_profiler_record_shapes,
            profile_memory=settings.torch_profiler_with_memory,
            with_flops=settings.torch_profiler_with_flops,
        )
        self._profiler.start()
        self._is_recording = True

    def _pause(self) -> None:
        if self._is_recording and self._profiler is not None:
            self._profiler.stop()
        self._is_recording = False

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
