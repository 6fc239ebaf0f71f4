"""Answers clients' batches while the server runs, in rows that live calls leave free.

A batch's call begins only while the engine has a free row beyond those of live calls. When live
calls need the rows, or wait for memory, the youngest calls of batches are withdrawn and made again
later. Under the priority policy, a batch's calls also have lower priority. After a restart, a batch
continues with the calls that have no answer in its files.

Started by `launch`.
"""

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import msgspec
from starlette.applications import Starlette
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import ConfigurationError
from quire.observability.log import get_logger
from quire.server.batch.answering import RETRIED, answer_call, answer_line, unanswered_line
from quire.server.batch.batch_book import Batch, BatchBook, Status
from quire.server.batch.engine_load import EngineLoad
from quire.server.batch.files import BatchCall, BatchInput, BatchOutput
from quire.server.generation.answer_store import Owner
from quire.server.http.guard import AccessConfig, BodyLimit
from quire.server.served_models import ServedModels
from quire.server.telemetry.monitor import BugReporter, Monitor, RequestIdMiddleware
from quire.server.tenants.tenants import Tenant

POLL_S = 0.05
"""Seconds between two looks at the engine's load."""

STATS_PERIOD_S = 0.25
"""Seconds between two questions whether live calls wait in the engine."""

RETRY_S = 1.0
"""Seconds that a batch waits after a call was answered with a status in RETRIED."""

ADDED_PRIORITY = 1 << 20
"""Added to the priority of a batch's calls; smaller numbers go first."""

DISK_RETRY_S = 30.0
"""Seconds that a batch waits if its state or answers could not be written."""

ENDS: Mapping[Status, Literal["completed", "cancelled"]] = {
    "finalizing": "completed",
    "cancelling": "cancelled",
}
"""Status of a batch -> the way in which it ends. With any other status, it expires."""

MAX_CALLS = 50_000
"""The maximum number of a batch's calls, as OpenAI has it."""

MAX_OPEN_JOBS = 8
"""The maximum number of one tenant's batches in progress; each takes memory and three open files.
The others wait."""

UNUSABLE = "the server can't go on with this batch; its log says why"

logger = get_logger(__name__)


class InnerApp:
    """The routes of an application without the check of keys, which was made when the batch's file
    was uploaded."""

    def __init__(self, app: Starlette, monitor: Monitor, max_body_bytes: int) -> None:
        self._app = app
        handlers = ExceptionMiddleware(app.router, handlers=app.exception_handlers)
        bounded = BugReporter(BodyLimit(handlers, max_body_bytes))
        self._chain: ASGIApp = RequestIdMiddleware(bounded, monitor)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self._app
        await self._chain(scope, receive, send)


@contextlib.asynccontextmanager
async def answering_batches(
    app: Starlette, models: ServedModels, access: AccessConfig
) -> AsyncIterator[None]:
    """Answer the server's batches, if it takes any, until the end of `async with`."""
    book = models.shared.batches
    if book is None:
        yield
        return
    inner = InnerApp(app, models.shared.monitor, access.max_body_bytes)
    find_tenant = Tenant if access.keys is None else access.keys.tenant_named
    runner = BatchRunner(inner, EngineLoad(models), book, find_tenant)
    running = asyncio.create_task(runner.run())
    running.add_done_callback(_report_bug)
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        book.close()


def _report_bug(running: "asyncio.Task[None]") -> None:
    if not running.cancelled() and (error := running.exception()) is not None:
        logger.error("batches are answered no more, because of a bug", exc_info=error)


@dataclass(slots=True)
class _Job:
    """A batch in progress. Invariant: a call is in `calls`, in `again`, open, or answered, unless
    `has_failed` or `disk_error` is set."""

    batch: Batch
    answers: BatchOutput
    errors: BatchOutput
    #: Calls that were not made yet.
    calls: Iterator[BatchCall]
    #: Calls that were withdrawn, or that the server could not take, the oldest first.
    again: deque[BatchCall] = field(default_factory=deque)
    #: Open calls with their generations, the oldest first.
    open: dict[asyncio.Task[None], int] = field(default_factory=dict)
    #: Time before which no call begins, by time.monotonic.
    not_before_s: float = 0.0
    #: Whether every call has begun at least once.
    is_read: bool = False
    #: Why a file could not be read or written; None if all could.
    disk_error: OSError | None = None
    #: Whether a call met a bug of the server.
    has_failed: bool = False

    def next_call(self) -> BatchCall | None:
        """The next call to make; None if there is none."""
        if self.again:
            return self.again.popleft()
        call = next(self.calls, None)
        self.is_read = call is None
        return call

    @property
    def is_over(self) -> bool:
        """Whether every call has an answer."""
        return self.is_read and not self.again and not self.open

    def count(self) -> None:
        """Write the numbers of answers into the batch."""
        counts = self.batch.request_counts
        counts.completed, counts.failed = len(self.answers.answered), len(self.errors.answered)

    def close(self) -> None:
        """Close the files of the answers."""
        self.answers.__exit__(None, None, None)
        self.errors.__exit__(None, None, None)


class BatchRunner:
    """The batches of a running server. Invariant: `_jobs` has a job for each batch in progress."""

    def __init__(
        self,
        app: ASGIApp,
        load: EngineLoad,
        book: BatchBook,
        find_tenant: Callable[[str], Tenant | None] = Tenant,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`app` answers the calls. `find_tenant` finds a tenant by its name. It returns None for a
        tenant whose keys were removed, and then the tenant's batches wait. `clock` is in seconds
        since 1970."""
        self._app = app
        self._find_tenant = find_tenant
        self._clock = clock
        self._load = load
        self._book = book
        self._jobs: deque[_Job] = deque()
        #: Batches that wait for their begin.
        self._new: deque[Batch] = deque(book.unfinished())
        #: Batch id -> time until which it waits after a failure of the disk, by time.monotonic.
        self._not_before_s: dict[str, float] = {}
        self._news = asyncio.Event()
        self._asked_s = 0.0
        book.on_change = self._on_change

    def _on_change(self, batch: Batch) -> None:
        if batch.status == "validating":
            self._new.append(batch)
        self._news.set()

    async def run(self) -> None:
        """Answer batches until cancelled; calls that are open then are made after a restart."""
        try:
            while True:
                await self._begin_next()
                await self._finish_jobs()
                self._fill_rows()
                await self._withdraw()
                # Without work, only a new batch wakes the runner.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S if self._jobs or self._new else None):
                        await self._news.wait()
                self._news.clear()
        finally:
            for job in self._jobs:
                await _end_open(job)
                job.close()

    # ---- jobs -------------------------------------------------------------------------------

    async def _begin_next(self) -> None:
        """Begin the next batch that may begin. Only one begins at a time, so that batches in
        progress continue while the files of a new one are checked."""
        num_open = Counter(self._book.owner_of(job.batch).tenant for job in self._jobs)
        batch = next((each for each in self._new if self._may_begin(each, num_open)), None)
        if batch is None:
            return
        self._new.remove(batch)
        self._news.set()  # for the batch after this one
        self._not_before_s.pop(batch.id, None)
        try:
            await self._begin(batch)
        except OSError as error:
            self._postpone(batch, error)

    def _may_begin(self, batch: Batch, num_open: Mapping[str, int]) -> bool:
        """Whether a batch may begin; `num_open` has the batches in progress by tenant."""
        if time.monotonic() < self._not_before_s.get(batch.id, 0.0):
            return False
        if batch.status == "cancelling" or self._clock() >= batch.expires_at:
            return True  # it ends at once
        return num_open.get(self._book.owner_of(batch).tenant, 0) < MAX_OPEN_JOBS

    async def _begin(self, batch: Batch) -> None:
        """Begin a batch, or end it. Raises OSError."""
        if batch.status == "finalizing" or batch.output_file_id or batch.error_file_id:
            # The server ended, or the disk failed, while the answers were published.
            self._book.publish(batch, ENDS.get(batch.status, "expired"))
            return
        path, name = self._book.files.path_of(batch.input_file_id), batch.input_file_id
        try:
            found = await asyncio.to_thread(BatchInput, path, [batch.endpoint], name, MAX_CALLS)
        except ConfigurationError as error:
            self._book.fail(batch, str(error))
            return
        try:
            job = self._open_job(batch, found)
        except ConfigurationError as error:  # names a path, which is for the log alone
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from error
            logger.error("%s can't go on: %s", batch.id, error)
            self._book.fail(batch, UNUSABLE)
            return
        if batch.status == "validating":
            try:
                self._book.set_status(batch, "in_progress")
            except OSError:
                job.close()
                raise
        self._jobs.append(job)

    def _postpone(self, batch: Batch, error: OSError) -> None:
        """Let a batch go on later as after a restart, since the disk has failed."""
        text = "the files of %s can't be used (%s); it goes on in %g s"
        logger.error(text, batch.id, error, DISK_RETRY_S)
        self._not_before_s[batch.id] = time.monotonic() + DISK_RETRY_S
        self._new.append(batch)

    def _open_job(self, batch: Batch, found: BatchInput) -> _Job:
        answers_path, errors_path = self._book.working_paths(batch)
        with contextlib.ExitStack() as opened:
            answers = opened.enter_context(BatchOutput(answers_path, found.custom_ids))
            errors = opened.enter_context(BatchOutput(errors_path, found.custom_ids))
            opened.pop_all()
        done = answers.answered | errors.answered
        calls = (call for call in found.calls() if call.custom_id not in done)
        job = _Job(batch, answers, errors, calls)
        batch.request_counts.total = len(found.custom_ids)
        job.count()
        return job

    async def _finish_jobs(self) -> None:
        now_s = self._clock()
        for job in list(self._jobs):
            if job.batch.status == "cancelling":
                await self._finish(job, "cancelled")
            elif now_s >= job.batch.expires_at:
                await self._finish(job, "expired")
            elif job.is_over or job.has_failed or job.disk_error is not None:
                await self._finish(job, "completed")

    async def _finish(
        self, job: _Job, status: Literal["completed", "expired", "cancelled"]
    ) -> None:
        self._jobs.remove(job)
        await _end_open(job)
        batch = job.batch
        try:
            with contextlib.closing(job):
                if job.disk_error is not None:
                    raise job.disk_error
                if status == "expired":
                    self._write_unanswered(job)
                job.count()
            if job.has_failed:
                self._book.fail(batch, UNUSABLE)
                return
            if status == "completed":
                self._book.set_status(batch, "finalizing")
            self._book.publish(batch, status)
        except OSError as error:
            self._postpone(batch, error)

    def _write_unanswered(self, job: _Job) -> None:
        """Write a line for each call that was not answered before the batch's time was over."""
        text = "this call was not answered within the batch's completion window"
        while (call := job.next_call()) is not None:
            line = unanswered_line(call.custom_id, "batch_expired", text)
            job.errors.write(call.custom_id, line)

    # ---- calls ------------------------------------------------------------------------------

    @property
    def _num_own(self) -> int:
        """Generations of all open calls of batches."""
        return sum(sum(job.open.values()) for job in self._jobs)

    @property
    def _num_free(self) -> int:
        """Rows that neither live calls nor batches use. One row stays free for the next live call,
        unless the engine has a single row. Negative if live calls need rows of batches."""
        # Calls of batches that have just begun are not open in the engine yet.
        return max(1, self._load.num_rows - 1) - max(self._load.num_open, self._num_own)

    def _fill_rows(self) -> None:
        """Begin calls while there are free rows, one of each batch in turn."""
        if not self._load.takes_calls:
            return
        free, waiting = self._num_free, 0
        while free > 0 and waiting < len(self._jobs):
            job = self._jobs[0]
            self._jobs.rotate(-1)
            call = self._next_call(job)
            if call is None:
                waiting += 1
                continue
            waiting = 0
            weight = num_generations(call.body)
            free -= weight
            task = asyncio.get_running_loop().create_task(self._make(job, call))
            job.open[task] = weight
            task.add_done_callback(partial(self._on_done, job, call))

    def _next_call(self, job: _Job) -> BatchCall | None:
        """The call of a job to make now; None if there is none."""
        is_late = job.not_before_s > time.monotonic() or job.batch.status == "cancelling"
        if is_late or job.has_failed or job.disk_error is not None:
            return None
        owner = self._book.owner_of(job.batch)
        if self._find_tenant(owner.tenant) is None:
            return None
        if not self._book.files.has_room(owner, self._num_written(owner)):
            return None  # until the tenant deletes files, or the batch expires
        try:
            return job.next_call()
        except ConfigurationError as error:  # the file can't be read any more
            job.disk_error = OSError(str(error))
            return None

    def _num_written(self, owner: Owner) -> int:
        """Bytes of answers that a tenant's batches in progress have written."""
        jobs = [
            each for each in self._jobs if self._book.owner_of(each.batch).tenant == owner.tenant
        ]
        return sum(job.answers.num_bytes + job.errors.num_bytes for job in jobs)

    def _on_done(self, job: _Job, call: BatchCall, task: asyncio.Task[None]) -> None:
        job.open.pop(task, None)
        self._news.set()
        if task.cancelled():  # withdrawn, maybe before it had begun
            job.again.appendleft(call)
        elif (error := task.exception()) is not None:
            logger.error("a call of %s has met a bug", job.batch.id, exc_info=error)
            job.has_failed = True

    async def _make(self, job: _Job, call: BatchCall) -> None:
        owner = self._book.owner_of(job.batch)
        tenant = self._find_tenant(owner.tenant)
        if tenant is None:  # its keys were removed a moment ago
            job.again.appendleft(call)
            return
        state: dict[str, Any] = {
            "tenant": tenant,
            "is_operator": False,
            "added_priority": ADDED_PRIORITY,
        }
        # On a server without keys, callers stay apart by this header as by their own keys.
        headers = {"x-api-key": f"batch {owner.caller}"} if owner.caller else {}
        answer = await answer_call(self._app, call, state, headers)
        if answer.status in RETRIED:
            job.again.appendleft(call)
            job.not_before_s = time.monotonic() + RETRY_S
            return
        output = job.answers if answer.status < 400 else job.errors
        try:
            output.write(call.custom_id, answer_line(call, answer))
        except OSError as error:
            job.disk_error = error
        job.count()

    async def _withdraw(self) -> None:
        """Withdraw the youngest calls of batches if live calls need their rows or memory."""
        num_own = self._num_own
        is_crowded = num_own > 0 and self._num_free < 0 and self._load.num_open > num_own
        if not is_crowded and not (num_own and await self._do_live_calls_wait(num_own)):
            return
        needed = max(1, -self._num_free)
        for job in self._jobs:
            for task, weight in reversed(list(job.open.items())):
                if needed <= 0:
                    return
                task.cancel()
                needed -= weight

    async def _do_live_calls_wait(self, num_own: int) -> bool:
        """Whether calls wait in the engine although it has rows for them. Asks at intervals."""
        now_s = time.monotonic()
        if self._load.num_open <= num_own or now_s - self._asked_s < STATS_PERIOD_S:
            return False
        self._asked_s = now_s
        return await self._load.do_calls_wait(STATS_PERIOD_S)


async def _end_open(job: _Job) -> None:
    """Withdraw all open calls of a job."""
    tasks = list(job.open)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Counted(msgspec.Struct):
    """The fields that tell how many generations a call has."""

    n: int | None = None
    prompt: object = None
    input: object = None


def num_generations(body: bytes) -> int:
    """The number of generations that a call asks for, prompts times n; 1 if it can't be told."""
    try:
        counted = msgspec.json.decode(body, type=_Counted)
    except (msgspec.DecodeError, RecursionError):
        return 1  # the call's answer will name the mistake
    given = counted.prompt or counted.input
    has_many = isinstance(given, list) and bool(given) and not isinstance(given[0], (int, dict))
    num_prompts = len(given) if has_many and isinstance(given, list) else 1
    return max(1, num_prompts * (counted.n or 1))
