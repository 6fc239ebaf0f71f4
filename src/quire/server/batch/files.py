"""The two files of a batch: one with the calls, one with the answers so far.

Each line of either file is a JSON object, as in OpenAI's Batch API. Answers are in the order of
arrival, each with the `custom_id` of its call. A batch that is run again continues after a crash:
calls that have an answer are not made twice, and an incomplete last line is removed. Independent of
the engine.
"""

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from quire.errors import ConfigurationError, did_you_mean

MAX_CUSTOM_ID_CHARACTERS = 512


class _Line(msgspec.Struct):
    """A line of the file of calls. Unknown fields are ignored, as OpenAI does."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _AnswerLine(msgspec.Struct):
    custom_id: str


@dataclass(frozen=True, slots=True)
class BatchCall:
    """One call of a batch."""

    #: The call's id in the file.
    custom_id: str
    #: Path of the endpoint.
    url: str
    #: The body as JSON.
    body: bytes


class BatchInput:
    """The calls of a batch file. The constructor checks the whole file; `calls` reads it again.

    Invariant: no two calls have the same custom_id.
    """

    def __init__(
        self,
        path: Path,
        urls: Collection[str],
        name: str | None = None,
        max_calls: int | None = None,
    ) -> None:
        """`urls` are the paths that may be called. `name` is the file's name in errors; None means
        its path. `max_calls` bounds the number of calls; None means no bound. Raises
        ConfigurationError with the number of a faulty line."""
        self.path = path
        self._name = name or str(path)
        self.custom_ids: set[str] = set()
        for number, line in self._lines():
            call = self._parse(number, line)
            where = f"line {number} of {self._name}"
            if call.url not in urls:
                raise ConfigurationError(
                    f"{where} calls {call.url!r:.80}{did_you_mean(call.url, urls)}; a batch may"
                    f" call {', '.join(sorted(urls))}"
                )
            if call.custom_id in self.custom_ids:
                raise ConfigurationError(
                    f"{where} has the custom_id {call.custom_id!r:.80} of an earlier line; each"
                    " must have its own"
                )
            self.custom_ids.add(call.custom_id)
            if max_calls is not None and len(self.custom_ids) > max_calls:
                raise ConfigurationError(
                    f"{self._name} has more than {max_calls} calls; split it into several files"
                )
        if not self.custom_ids:
            raise ConfigurationError(f"{self._name} has no calls in it: one JSON object a line")

    def calls(self) -> Iterator[BatchCall]:
        """The calls in the order of the file. Each line is read when its call is requested."""
        for number, line in self._lines():
            call = self._parse(number, line)
            yield BatchCall(call.custom_id, call.url, bytes(call.body))

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        try:
            with self.path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield number, line
        except OSError as error:
            raise ConfigurationError(f"{self._name} can't be read: {error.strerror}") from error

    def _parse(self, number: int, line: bytes) -> _Line:
        where = f"line {number} of {self._name}"
        try:
            call = msgspec.json.decode(line, type=_Line)
            str(call.body, "utf-8")  # msgspec does not check this part
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigurationError(
                f"{where} is no call: {error}; it must be an object with custom_id, method, url"
                " and body"
            ) from error
        if call.method != "POST":
            raise ConfigurationError(f"{where} has the method {call.method!r:.20}, but must POST")
        if not 0 < len(call.custom_id) <= MAX_CUSTOM_ID_CHARACTERS:
            raise ConfigurationError(
                f"{where} has a custom_id of {len(call.custom_id)} characters, but it must have 1"
                f" to {MAX_CUSTOM_ID_CHARACTERS}"
            )
        if not bytes(call.body).startswith(b"{"):
            raise ConfigurationError(f"{where} has a body that is no object")
        return call


def _open_private(path: str, flags: int) -> int:
    """Open a file. Only the owner may read a new file, since answers are as private as prompts. An
    existing file keeps its mode."""
    return os.open(path, flags, 0o600)


class BatchOutput:
    """The file of a batch's answers, which may already contain the answers of an earlier run.

    Invariant: the file ends with a complete line, unless a write has failed.
    """

    def __init__(self, path: Path, custom_ids: Collection[str]) -> None:
        """`custom_ids` are the ids of the batch's calls. Raises ConfigurationError for a file that
        can't be written, or that contains anything but answers to these calls."""
        self.path = path
        self.answered: set[str] = set()
        #: Bytes of the answers so far.
        self.num_bytes = 0
        self._file: FileIO | None = None
        try:
            if path.is_file():  # a device or a pipe holds no earlier answers
                self._resume_output(custom_ids)
            # Unbuffered: after a failed write, no rest of a line stays in a buffer to be written.
            self._file = FileIO(path, "ab", opener=_open_private)
        except OSError as error:
            raise ConfigurationError(f"{path} can't be written: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._file is not None
        if self.path.is_file():
            os.fsync(self._file.fileno())
        self._file.close()

    def write(self, custom_id: str, answer: dict[str, Any]) -> None:
        """Append the answer as one line, without buffering. Raises OSError."""
        assert self._file is not None
        line = memoryview(msgspec.json.encode(answer) + b"\n")
        size = len(line)
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            text = f"{error.strerror}; answers so far are kept: run the same command again later"
            raise OSError(error.errno, text, str(self.path)) from error
        self.answered.add(custom_id)
        self.num_bytes += size

    def _resume_output(self, custom_ids: Collection[str]) -> None:
        size = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break  # the earlier run ended while it wrote this line
                self.answered.add(self._known_id(number, line, custom_ids))
                size += len(line)
        os.truncate(self.path, size)
        self.num_bytes = size

    def _known_id(self, number: int, line: bytes, custom_ids: Collection[str]) -> str:
        try:
            custom_id = msgspec.json.decode(line, type=_AnswerLine).custom_id
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"line {number} of {self.path} is no answer of a batch; name another file for the"
                " answers"
            ) from error
        if custom_id not in custom_ids:
            raise ConfigurationError(
                f"{self.path} has an answer to {custom_id!r:.80}, which is no call of this batch;"
                " name another file for the answers"
            )
        return custom_id
