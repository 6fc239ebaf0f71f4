"""Reads a multipart/form-data body with one file, piece by piece (RFC 7578).

The file's bytes are passed on as they arrive, so that an upload of hundreds of megabytes takes no
memory. Called by the routes that take files.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from email import message_from_string
from email.message import Message

from quire.errors import InvalidRequestError

MAX_FIELDS = 16
MAX_FIELD_BYTES = 4096
MAX_HEADER_BYTES = 8192
MAX_BOUNDARY_CHARACTERS = 70
"""Maximum number of fields beside the file, bytes of one field, bytes of one part's headers, and
characters of the boundary (RFC 2046)."""


@dataclass(slots=True)
class Form:
    """The fields of a form, without the bytes of its file."""

    fields: dict[str, str] = field(default_factory=dict)
    #: Name of the file on the client's machine; None before the form's file.
    filename: str | None = None


class FormReader:
    """Splits a body at its boundary. Invariant: `_buffer` has the bytes that may begin a boundary
    or are part of an incomplete header."""

    def __init__(self, content_type: str, file_field: str, write: Callable[[bytes], None]) -> None:
        """The bytes of the field `file_field` go to `write`. Raises InvalidRequestError for another
        Content-Type."""
        header = Message()
        header["content-type"] = content_type
        boundary = header.get_param("boundary")
        if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
            raise InvalidRequestError(
                f"the Content-Type is {content_type!r:.80}, but must be multipart/form-data with a"
                " boundary"
            )
        if not 0 < len(boundary) <= MAX_BOUNDARY_CHARACTERS:
            raise InvalidRequestError(
                f"the form's boundary has {len(boundary)} characters, but must have 1 to"
                f" {MAX_BOUNDARY_CHARACTERS}"
            )
        self.form = Form()
        self._delimiter = b"\r\n--" + boundary.encode("latin-1", "replace")
        self._file_field = file_field
        self._write = write
        self._buffer = b"\r\n"  # so that the first boundary looks like the others
        self._is_in_headers = False
        self._has_ended = False
        #: Name of the part that is being read; None before the first part.
        self._name: str | None = None
        self._value = b""

    async def read(self, pieces: AsyncIterator[bytes]) -> Form:
        """Read the whole body. Raises InvalidRequestError, and the errors of `write`."""
        async for piece in pieces:
            self._buffer += piece
            while self._advance():
                pass
        if not self._has_ended:
            raise _malformed("it ends before its last boundary")
        return self.form

    def _advance(self) -> bool:
        """Handle the next part of the buffer. Returns False if more bytes are needed."""
        if self._has_ended:
            self._buffer = b""  # bytes after the last boundary have no meaning
            return False
        return self._begin_part() if self._is_in_headers else self._continue_part()

    def _continue_part(self) -> bool:
        at = self._buffer.find(self._delimiter)
        if at < 0:
            kept = len(self._delimiter) - 1
            self._take(self._buffer[:-kept])
            self._buffer = self._buffer[-kept:]
            return False
        end = at + len(self._delimiter)
        if len(self._buffer) < end + 2:
            return False
        self._take(self._buffer[:at])
        self._end_part()
        follows = self._buffer[end : end + 2]
        if follows not in (b"--", b"\r\n"):
            raise _malformed("a boundary is not followed by a new line")
        self._has_ended, self._is_in_headers = follows == b"--", follows == b"\r\n"
        self._buffer = self._buffer[end + 2 :]
        return True

    def _begin_part(self) -> bool:
        at = self._buffer.find(b"\r\n\r\n")
        if (len(self._buffer) if at < 0 else at) > MAX_HEADER_BYTES:
            raise _malformed(f"a part has more than {MAX_HEADER_BYTES} bytes of headers")
        if at < 0:
            return False
        headers = message_from_string(self._buffer[: at + 4].decode("utf-8", "replace"))
        name = headers.get_param("name", header="content-disposition")
        if not isinstance(name, str):
            raise _malformed("a part has no name")
        self._name, self._value = name, b""
        if name == self._file_field:
            if self.form.filename is not None:
                raise InvalidRequestError(f"there are two fields {name!r}; send one file", name)
            self.form.filename = _filename_of(headers)
        self._buffer, self._is_in_headers = self._buffer[at + 4 :], False
        return True

    def _take(self, data: bytes) -> None:
        if self._name == self._file_field:
            if data:
                self._write(data)
        elif self._name is not None:
            self._value += data
            if len(self._value) > MAX_FIELD_BYTES:
                raise InvalidRequestError(
                    f"the field {self._name!r:.80} has more than {MAX_FIELD_BYTES} bytes",
                    self._name,
                )

    def _end_part(self) -> None:
        if self._name is None or self._name == self._file_field:
            return
        if self._name in self.form.fields:
            raise InvalidRequestError(f"there are two fields {self._name!r:.80}", self._name)
        if len(self.form.fields) >= MAX_FIELDS:
            raise _malformed(f"it has more than {MAX_FIELDS} fields")
        self.form.fields[self._name] = self._value.decode("utf-8", "replace")


def _filename_of(headers: Message) -> str:
    """The name of a part's file; "" without one. Raises InvalidRequestError for a name in another
    character set than UTF-8, since Python has some that give no valid text."""
    given = headers.get_param("filename", header="content-disposition", failobj="")
    if not isinstance(given, tuple):
        return given
    if (given[0] or "utf-8").lower() not in ("utf-8", "us-ascii"):
        raise _malformed("the file's name is not in UTF-8")
    return given[2].encode("latin-1", "replace").decode("utf-8", "replace")


def _malformed(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"the form is malformed: {what}")
