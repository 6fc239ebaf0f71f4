"""Answers the calls of a batch file in this process, a bounded number at a time.

The engine is a separate process, as in the server: if it dies it is restarted, and open calls
continue. The calls go through the server's application, so fields and errors are the same as over
HTTP. Called by the command line.
"""

import asyncio
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
from starlette.applications import Starlette
from tqdm import tqdm

from quire.engine_client.fleet import EngineFleet
from quire.errors import ConfigurationError, QuireError
from quire.server.app import create_app
from quire.server.batch.answering import RETRIED, answer_call, answer_line
from quire.server.batch.files import BatchCall, BatchInput, BatchOutput
from quire.server.batch.inner_call import InnerAnswer
from quire.server.config import ServerConfig
from quire.server.endpoint_registry import ENDPOINTS
from quire.server.launch import ServerPlan, plan_server
from quire.server.model_launch import (
    ModelPlan,
    begin_grammars,
    make_plan,
    make_service,
    start_engine,
)
from quire.server.served_models import ServedModels
from quire.server.telemetry.monitor import Monitor

OPEN_CALLS_PER_ROW = 2
"""Open calls per sequence that the engine runs at once: enough that no row waits for a call."""

RETRY_S = 0.2
"""Seconds before a call with a status of RETRIED is made again."""

LINE_EVERY_S = 10.0
"""Seconds between two progress lines, which are printed if stderr is no terminal."""


@dataclass(frozen=True, slots=True)
class BatchJob:
    """The input and output files of a batch, and the maximum number of open calls."""

    input: Path
    output: Path
    #: Maximum number of calls that are open at once; None means OPEN_CALLS_PER_ROW for each
    #: sequence that the engine runs at once.
    max_open_calls: int | None = None


def batch_urls() -> list[str]:
    """The paths that a batch may call."""
    return [path for _, each in ENDPOINTS.items() for path in each.batch_paths]


def run_batch(engine_options: Mapping[str, object], server: ServerConfig, job: BatchJob) -> int:
    """Make the calls that have no answer yet. Returns exit code 0 once each call has an answer or
    an error.

    `engine_options` has the fields of `EngineOptions` by name. Raises ConfigurationError and its
    subclasses for options, models and files that can't be used, EngineDeadError if the engine fails
    for good, OSError if the answers can't be written.
    """
    calls = BatchInput(job.input, batch_urls())
    if job.output.exists() and job.output.samefile(job.input):
        raise ConfigurationError(f"{job.input} is the file of the calls; name another for answers")
    with BatchOutput(job.output, calls.custom_ids) as output:
        num_left = len(calls.custom_ids) - len(output.answered)
        if output.answered:
            print(f"{len(output.answered)} calls have an answer in {output.path}; {num_left} left")
        if num_left:
            model, plan = make_plan(engine_options, server), plan_server(server)
            with closing(model.files.grammars):
                tally = asyncio.run(_run(model, plan, calls, output, job.max_open_calls))
            print(tally.summary(output.path))
    return 0


async def _run(
    model: ModelPlan,
    plan: ServerPlan,
    calls: BatchInput,
    output: BatchOutput,
    max_open_calls: int | None,
) -> "Tally":
    engine = await start_engine(model)
    monitor = Monitor(model_name=model.model_names[0])
    try:
        begin_grammars(model.files, engine.limits)
        service = make_service(model, engine, plan.shared_state(monitor))
        app = create_app(ServedModels.of(service), plan.access)
        num_open = max_open_calls or OPEN_CALLS_PER_ROW * int(engine.facts["max_num_seqs"])
        return await _Batch(app, engine, calls, output).run(num_open)
    finally:
        await engine.shutdown(drain=False, timeout_s=5.0)
        monitor.close()


@dataclass(slots=True)
class Tally:
    """Counts of this run's calls and tokens."""

    num_answered: int = 0
    num_failed: int = 0
    num_generated_tokens: int = 0
    #: Start of the run by time.monotonic, in seconds.
    began_s: float = field(default_factory=time.monotonic)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of this run."""
        return self.num_generated_tokens / max(1e-9, time.monotonic() - self.began_s)

    def summary(self, path: Path) -> str:
        """The sentence that is printed at the end of the run."""
        failed = f", {self.num_failed} of them errors" if self.num_failed else ""
        elapsed_s = time.monotonic() - self.began_s
        return (
            f"{self.num_answered} calls answered{failed}, in {elapsed_s:.1f} s"
            f" ({self.tokens_per_s:.0f} tokens/s): {path}"
        )


class _Batch:
    """The open calls of a batch. Invariant: each call is answered once, or left for a later run."""

    def __init__(
        self, app: Starlette, engine: EngineFleet, calls: BatchInput, output: BatchOutput
    ) -> None:
        self._app = app
        self._engine = engine
        self._output = output
        self._num_calls = len(calls.custom_ids)
        self._calls = (call for call in calls.calls() if call.custom_id not in output.answered)
        self._tally = Tally()

    async def run(self, num_open: int) -> Tally:
        """Make all calls, `num_open` at a time. Raises the engine's error if the engine fails for
        good."""
        with closing(_progress(self._num_calls, len(self._output.answered))) as progress:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(num_open):
                        group.create_task(self._work(progress))
            except* (QuireError, OSError) as errors:
                raise errors.exceptions[0] from None
        return self._tally

    async def _work(self, progress: "BatchProgress") -> None:
        """Make the next call until none is left. Several workers share the calls."""
        for call in self._calls:
            answer = await self._answer(call)
            self._write(call, answer)
            progress.update(self._tally)

    async def _answer(self, call: BatchCall) -> InnerAnswer:
        while True:
            answer = await answer_call(self._app, call)
            if answer.status not in RETRIED:
                return answer
            if not self._engine.is_alive:
                raise await self._engine.wait_failed()
            await asyncio.sleep(RETRY_S)

    def _write(self, call: BatchCall, answer: InnerAnswer) -> None:
        self._output.write(call.custom_id, answer_line(call, answer))
        self._tally.num_answered += 1
        self._tally.num_failed += answer.status >= 400
        self._tally.num_generated_tokens += _num_generated(answer.body)


class _UsageField(msgspec.Struct):
    """The number of generated tokens in an answer's `usage`: each API uses one of these fields."""

    completion_tokens: int = 0
    output_tokens: int = 0


class _Answered(msgspec.Struct):
    usage: _UsageField | None = None


def _num_generated(body: bytes) -> int:
    usage = msgspec.json.decode(body, type=_Answered).usage
    return 0 if usage is None else usage.completion_tokens + usage.output_tokens


class BatchProgress(Protocol):
    """Shows the progress of a batch."""

    def update(self, tally: Tally) -> None:
        """Called after each answered call."""
        ...

    def close(self) -> None:
        """Called after the last call."""
        ...


class _Bar:
    """Progress as a bar on a terminal."""

    def __init__(self, total: int, initial: int) -> None:
        self._bar = tqdm(total=total, initial=initial, unit="call", dynamic_ncols=True)

    def update(self, tally: Tally) -> None:
        self._bar.set_postfix_str(f"{tally.tokens_per_s:.0f} tok/s", refresh=False)
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


class _Lines:
    """Progress in a log: a line every LINE_EVERY_S."""

    def __init__(self, total: int, initial: int) -> None:
        self._total, self._initial = total, initial
        self._last_s = time.monotonic()

    def update(self, tally: Tally) -> None:
        if (now_s := time.monotonic()) - self._last_s >= LINE_EVERY_S:
            self._last_s = now_s
            num_done = self._initial + tally.num_answered
            print(f"{num_done} of {self._total} calls, {tally.tokens_per_s:.0f} tokens/s")

    def close(self) -> None:
        pass


def _progress(total: int, initial: int) -> BatchProgress:
    return _Bar(total, initial) if sys.stderr.isatty() else _Lines(total, initial)
