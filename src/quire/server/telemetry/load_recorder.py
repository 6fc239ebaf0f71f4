"""Records the load of the server, without texts: `quire serve --record FILE`.

The event loop only collects the tokens of each answer. When a request has ended, a thread replaces
each block of its tokens by a number and writes a line. Only the thread and `close` wait for the
disk; if the thread falls behind, requests are left out and counted. A failure in the thread is
logged once and ends the recording, but not the server.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

from quire.core.request import Request, SequenceOutput
from quire.core.sampling_params import ModelLimits
from quire.errors import ConfigurationError
from quire.observability.log import get_logger
from quire.server.config import ServerConfig
from quire.traces.prefix_ids import BlockNumbers, PrefixIds
from quire.traces.recording import (
    VERSION,
    Line,
    RecordedChoice,
    RecordedRefusal,
    RecordedRequest,
    RecordingHeader,
    RecordingSummary,
    line_bytes,
)

MAX_WAITING = 8192
"""Maximum number of ended requests that wait to be written."""
MAX_WAITING_TOKENS = 8_000_000
"""Maximum number of tokens of the waiting requests: about 300 MB of memory."""

WRITE_PERIOD_S = 1.0
"""Seconds between two wake-ups of the thread. A wake-up per request would take several times the
processor time."""

CLOSE_TIMEOUT_S = 10.0

LEAST_REQUESTS = 128
"""Minimum number of requests for the summary to have a cache hit rate."""

logger = get_logger(__name__)


@dataclass(slots=True)
class _EndedRequest:
    """A request that has ended, with its answer. Times are in seconds of the recorder's clock."""

    number: int
    request: Request
    #: Generated tokens of each branch.
    outputs: list[list[int]]
    #: Finish reason of each branch.
    ends: list[str]
    began_s: float
    #: Time of the first token; None if there was no token.
    first_s: float | None
    ended_s: float
    is_streamed: bool
    num_cached_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the waiting request holds in memory."""
        return len(self.request.prompt_token_ids) + sum(map(len, self.outputs))


@dataclass(frozen=True, slots=True)
class _RefusedCall:
    number: int
    at_s: float
    status: int
    kind: str
    num_tokens: ClassVar[int] = 0


class RecordedCall:
    """One call's requests while they run. Used only by the event loop."""

    __slots__ = ("_open", "_recorder", "is_streamed")

    def __init__(self, recorder: LoadRecorder, requests: Sequence[Request], began_s: float) -> None:
        """Call `LoadRecorder.open_call` instead."""
        self.is_streamed = True
        self._recorder = recorder
        self._open = {
            request.request_id: _EndedRequest(
                recorder.next_number(),
                request,
                [[] for _ in range(request.n)],
                [""] * request.n,
                began_s,
                None,
                began_s,
                True,
            )
            for request in requests
        }

    def on_output(self, output: SequenceOutput, now_s: float) -> None:
        """Add an engine's output for a branch that has not ended."""
        found = self._open[output.request_id]
        if found.first_s is None:
            found.first_s, found.num_cached_tokens = now_s, output.num_cached_tokens
        found.outputs[output.branch_index].extend(output.token_ids)

    def on_end(self, request_id: str, branch_index: int, reason: str, now_s: float) -> None:
        """Record the end of a branch, once."""
        found = self._open[request_id]
        found.ends[branch_index] = reason
        if all(found.ends):
            del self._open[request_id]
            found.ended_s, found.is_streamed = now_s, self.is_streamed
            self._recorder.submit(found)


class LoadRecorder:
    """Writes one recording. Public methods except `close` must be called in the event loop.

    Invariant: after the first failure nothing more is written; every submitted request is written
    or counted as lost.
    """

    def __init__(
        self,
        path: Path,
        block_tokens: int,
        time_ms: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the file, readable only by its owner.

        Prompts and answers are compared in blocks of `block_tokens` tokens. Times are rounded to
        multiples of `time_ms`. `clock` is the clock that measured the calls' times. Raises
        ConfigurationError if the file exists or can't be made.
        """
        self._path = path
        self._time_ms = time_ms
        self._ids = PrefixIds(block_tokens)
        self._block_tokens = block_tokens
        self._clock = clock
        self._began_s = 0.0
        self._num_numbers = self._num_lost = 0
        self._num_put_tokens = 0  # only the event loop changes it
        self._num_taken_tokens = 0  # only the thread changes it
        self._tenants: dict[str, int] = {}
        self._adapters: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self._waiting: deque[_EndedRequest | _RefusedCall] = deque()
        self._is_closing = threading.Event()
        self._has_failed = False
        self._thread: threading.Thread | None = None
        self._file = _create(path)

    def begin(self, limits: ModelLimits, facts: Mapping[str, Any]) -> None:
        """Write the header and begin to record. `limits` and `facts` are the engine's. Raises
        ConfigurationError for a model whose calls are not recorded."""
        if not limits.generates:
            raise ConfigurationError(
                "record is set, but this model embeds and scores, and only the load of models that"
                " generate is recorded; leave it out"
            )
        self._began_s = self._clock()
        names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size")
        sizes = {name: int(facts.get(name) or 0) for name in (*names, "num_blocks")}
        header = RecordingHeader(VERSION, self._block_tokens, self._time_ms, **sizes)
        self._thread = threading.Thread(
            target=self._run, args=(header,), name="quire-recorder", daemon=True
        )
        self._thread.start()
        logger.info("recording the load into %s, without its texts", self._path)

    def open_call(self, requests: Sequence[Request], began_s: float) -> RecordedCall:
        """Begin to record requests that the engine has accepted."""
        return RecordedCall(self, requests, began_s)

    def refuse(self, began_s: float, status: int, kind: str) -> None:
        """Record a call that was answered with an error before the engine accepted it."""
        self.submit(_RefusedCall(self.next_number(), began_s, status, kind))

    def next_number(self) -> int:
        """Assign the number of the next request."""
        self._num_numbers += 1
        return self._num_numbers - 1

    def submit(self, ended: _EndedRequest | _RefusedCall) -> None:
        """Hand an ended request or a refused call to the thread."""
        if self._has_failed:
            return
        num_waiting_tokens = self._num_put_tokens - self._num_taken_tokens
        if len(self._waiting) < MAX_WAITING and num_waiting_tokens < MAX_WAITING_TOKENS:
            self._num_put_tokens += ended.num_tokens
            self._waiting.append(ended)
            return
        if not self._num_lost:
            logger.warning(
                "%s is written more slowly than requests end; some are left out of the recording",
                self._path,
            )
        self._num_lost += 1

    def close(self) -> None:
        """Write the waiting requests and the summary, which may take some seconds. If the recording
        has not begun, deletes the file."""
        if self._thread is None:
            self._file.close()
            self._path.unlink(missing_ok=True)
            return
        self._is_closing.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning(
                "%s could not be ended in %g s; its last lines may be missing",
                self._path,
                CLOSE_TIMEOUT_S,
            )

    # ---- in the thread ----------------------------------------------------------------------

    def _run(self, header: RecordingHeader) -> None:
        try:
            self._write(header)
            is_last = False
            while not is_last and not self._ids.is_full:
                is_last = self._is_closing.wait(WRITE_PERIOD_S)
                self._write_waiting()
                self._file.flush()
            if self._ids.is_full:
                self._has_failed = True
                self._num_lost += len(self._waiting)
                self._waiting.clear()
                logger.warning(
                    "the recording %s ends here, since it has the maximum number of blocks",
                    self._path,
                )
            self._write(self._summary())
            self._file.close()
        except Exception as error:  # no error of the recording may end the server
            self._has_failed = True
            reason = error.strerror if isinstance(error, OSError) else repr(error)
            logger.error("the recording %s ends here: %s", self._path, reason)
            self._waiting.clear()
            _close_quietly(self._file)
        finally:
            self._ids.forget()

    def _write_waiting(self) -> None:
        while self._waiting and not self._ids.is_full:
            ended = self._waiting.popleft()
            self._write(self._line(ended))
            self._num_taken_tokens += ended.num_tokens

    def _write(self, line: Line) -> None:
        self._file.write(line_bytes(line))

    def _line(self, ended: _EndedRequest | _RefusedCall) -> RecordedRequest | RecordedRefusal:
        if isinstance(ended, _RefusedCall):
            self._counts["refusals"] += 1
            return RecordedRefusal(ended.number, self._at_ms(ended.at_s), ended.status, ended.kind)
        request = ended.request
        adapter = "" if request.adapter is None else request.adapter.digest
        domain = f"{len(adapter)}:{adapter}{request.cache_domain}"
        end_ms = self._at_ms(ended.ended_s)
        numbers = self._ids.add(
            ended.number,
            domain,
            request.prompt_token_ids,
            ended.outputs,
            end_ms,
            [span[:3] for span in request.content_spans],
        )
        self._counts["requests"] += 1
        if ended.first_s is not None:  # without output the number of cached tokens is unknown
            self._counts["prompt_tokens"] += len(request.prompt_token_ids)
            self._counts["cached_tokens"] += ended.num_cached_tokens
            self._counts["answered"] += 1
        return self._request_line(ended, numbers, self._adapter_number(adapter))

    def _request_line(
        self, ended: _EndedRequest, numbers: BlockNumbers, adapter: int
    ) -> RecordedRequest:
        request, params = ended.request, ended.request.params
        spans = request.content_spans
        at_ms, end_ms = self._at_ms(ended.began_s), self._at_ms(ended.ended_s)
        parent, think_ms = numbers.parent, 0
        if parent is not None:
            think_ms = at_ms - numbers.parent_ended_ms
            if think_ms < 0:  # the parent ended later, so this request does not continue it
                parent, think_ms = None, 0
        choices = zip(ended.outputs, ended.ends, numbers.output_ids, strict=True)
        return RecordedRequest(
            number=ended.number,
            at_ms=at_ms,
            tenant=self._tenants.setdefault(request.tenant, len(self._tenants)),
            prompt_tokens=len(request.prompt_token_ids),
            blocks=numbers.prefix_ids,
            choices=tuple(RecordedChoice(len(ids), end, blocks) for ids, end, blocks in choices),
            max_tokens=params.max_tokens,
            took_ms=end_ms - at_ms,
            first_ms=None if ended.first_s is None else self._at_ms(ended.first_s) - at_ms,
            greedy=params.temperature == 0,
            stream=ended.is_streamed,
            grammar=params.grammar is not None,
            beam_width=params.beam_width,
            adapter=adapter,
            parent=parent,
            think_ms=think_ms,
            contents=tuple((span.first_position, span.num_tokens) for span in spans),
        )

    def _adapter_number(self, digest: str) -> int:
        """The adapter's number, from 1 in order of first use; 0 without an adapter."""
        return self._adapters.setdefault(digest, len(self._adapters) + 1) if digest else 0

    def _summary(self) -> RecordingSummary:
        counts, hit_rate = self._counts, None
        if counts["answered"] >= LEAST_REQUESTS:
            hit_rate = round(counts["cached_tokens"] / counts["prompt_tokens"], 3)
        return RecordingSummary(
            counts["requests"],
            counts["refusals"],
            self._num_lost,
            hit_rate,
            self._ids.overlap.shared_tail_tokens,
            self._ids.overlap.continued_share,
        )

    def _at_ms(self, at_s: float) -> int:
        grid = self._time_ms
        return max(0, round(1000 * (at_s - self._began_s) / grid) * grid)


def make_recorder(server: ServerConfig) -> LoadRecorder | None:
    """The recorder that the server's options ask for; None if they ask for none. Raises
    ConfigurationError."""
    if server.record is None:
        for name in ("record_block_tokens", "record_time_ms"):
            value, default = getattr(server, name), getattr(ServerConfig, name)
            if value != default:
                raise ConfigurationError(
                    f"{name} is {value}, but nothing is recorded; name a file with record, or"
                    f" leave {name} out"
                )
        return None
    return LoadRecorder(Path(server.record), server.record_block_tokens, server.record_time_ms)


def _create(path: Path) -> IO[bytes]:
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
    except FileExistsError as error:
        raise ConfigurationError(
            f"record names {path}, which exists; each recording hashes with its own key, so nothing"
            " can be appended: name another file, or remove this one"
        ) from error
    except OSError as error:
        raise ConfigurationError(f"record names {path}, but {error.strerror}") from error


def _close_quietly(file: IO[bytes]) -> None:
    """Close a file after a failed write, ignoring the error of flushing its buffer."""
    with contextlib.suppress(OSError):
        file.close()
