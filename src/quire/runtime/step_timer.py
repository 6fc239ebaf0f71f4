"""Measures how long a GPU runs each step, and how long it waits for the host.

`model_runner` marks the beginning and the end of each step.
"""

from collections import deque
from time import perf_counter
from typing import NamedTuple

import torch


class _Span(NamedTuple):
    """A step on the device."""

    began: torch.cuda.Event
    ended: torch.cuda.Event
    #: The seconds that the host took to queue the step; 0 if the previous step was still running
    #: when this step was completely queued, since the device then did not wait for the host.
    launch_s: float


class StepTimer:
    """Measures how long steps run on a GPU, by events in its queue.

    Invariant: `_spans` are the steps, in order, whose results were not fetched yet.
    """

    def __init__(self) -> None:
        self._began: torch.cuda.Event | None = None
        self._began_s = 0.0
        self._spans: deque[_Span] = deque()
        self._unused: list[torch.cuda.Event] = []

    def begin(self) -> None:
        """Mark the beginning of a step in the queue of the current device.

        Called when the host has built the batch. If the queue is empty, the device begins now.
        """
        self._began_s = perf_counter()
        self._began = self._mark()

    def end(self) -> None:
        """Mark the end of the step, when all its work is queued."""
        assert self._began is not None, "no step has begun"
        runs_before = bool(self._spans) and not _has_ended(self._spans[-1])
        launch_s = 0.0 if runs_before else perf_counter() - self._began_s
        self._spans.append(_Span(self._began, self._mark(), launch_s))
        self._began = None

    def wait(self) -> tuple[float, float]:
        """Wait until the oldest step has ended.

        Returns the seconds that it ran, and an upper bound of the seconds among them in which the
        device waited for the host to queue work.
        """
        span = self._spans.popleft()
        span.ended.synchronize()
        ran_s = span.began.elapsed_time(span.ended) / 1e3
        self._unused += (span.began, span.ended)
        return ran_s, min(ran_s, span.launch_s)

    def clear(self) -> None:
        """Drop the records of all unfinished steps, after a failure."""
        self._began = None
        self._spans.clear()

    def _mark(self) -> torch.cuda.Event:
        event = self._unused.pop() if self._unused else _new_event()
        event.record()
        return event


def _has_ended(span: _Span) -> bool:
    has_ended: bool = span.ended.query()  # type: ignore[no-untyped-call]
    return has_ended


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
