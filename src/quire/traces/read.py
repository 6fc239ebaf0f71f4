"""Reads a request trace in any of the known formats, detected by the file's first line."""

from __future__ import annotations

from pathlib import Path

from quire.errors import ConfigurationError
from quire.traces.azure import HEADER, read_azure
from quire.traces.mooncake import read_mooncake
from quire.traces.recording import is_recording, read_recording
from quire.traces.trace import Trace

_MAX_FIRST_LINE_BYTES = 1 << 24


def read_trace(path: Path) -> Trace:
    """Read a recording, or a trace in Mooncake's or Azure's format.

    Raises ConfigurationError that names the file, and the line number if a line is malformed.
    """
    try:
        with path.open("rb") as file:
            first = file.readline(_MAX_FIRST_LINE_BYTES).removeprefix(b"\xef\xbb\xbf").strip()
            while not first and (line := file.readline(_MAX_FIRST_LINE_BYTES)):
                first = line.strip()
        if is_recording(first):
            return read_recording(path)
        if first.startswith(b"{"):
            return read_mooncake(path)
        if HEADER[0].encode() in first:
            return read_azure(path)
    except OSError as error:
        raise ConfigurationError(f"the trace {path} can't be read: {error.strerror}") from error
    raise ConfigurationError(
        f"{path} is not a trace: its first line must be a JSON object (quire's and Mooncake's"
        f" formats) or the columns {', '.join(HEADER)} (Azure's)"
    )
