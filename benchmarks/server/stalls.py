"""Whether one call holds up the others: the longest pause that it makes, and what memory it leaves.

    python -m benchmarks.server.stalls --out stalls.json --markdown stalls.md

starts `quire serve` (the embedded model, unless --model says otherwise; what follows `--` is given
to it as it stands). While each call of `CASES` is answered, one client asks for /version again and
again, which the API server answers alone, and another reads a stream of the highest priority, which
needs API server and engine. The table has the longest wait of both, beside what they wait without
the call, and the API server's memory before, at its highest, and afterwards. Ends with 1 if a call
held up the API server for longer than --limit-ms. Needs psutil and, for the highest memory, Linux.
"""

import argparse
import json
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from http.client import HTTPConnection
from pathlib import Path

from benchmarks.cpu.tables import table
from benchmarks.server.serving import Server, ServingError, resident_bytes, served
from benchmarks.server.stall_cases import CASES, completion

MIB = 1 << 20
LOG = Path(tempfile.gettempdir()) / "quire_stalls.log"
SERVER_ARGUMENTS = (
    *("--num-threads", "1", "--scheduling-policy", "priority"),
    *("--max-queued-requests", "8192", "--log-level", "error"),
)
CALL_LIMIT_S = 120.0
QUIET_S = 1.0
PROBE_PAUSE_S = 0.002


@dataclass(slots=True)
class Gaps:
    """How long a client waited, each time. Only those after `clear` count."""

    seconds: list[float] = field(default_factory=list)
    waits_since_s: float | None = None

    def clear(self) -> None:
        self.seconds.clear()

    def longest_s(self) -> float:
        """The wait that goes on included."""
        since_s = self.waits_since_s
        going_on_s = 0.0 if since_s is None else time.perf_counter() - since_s
        return max([*self.seconds, going_on_s])

    @contextmanager
    def waiting(self) -> Iterator[None]:
        start_s = self.waits_since_s = time.perf_counter()
        yield
        self.waits_since_s = None
        self.seconds.append(time.perf_counter() - start_s)


@dataclass(frozen=True, slots=True)
class Found:
    """The effects of one call. probe, stream: the longest waits, in seconds; normal: without the
    call."""

    case: str
    status: int
    answer_bytes: int
    seconds: float
    normal_probe_s: float
    probe_s: float
    normal_stream_s: float
    stream_s: float
    before_bytes: int
    peak_bytes: int
    after_bytes: int


def request(path: str, body: bytes) -> bytes:
    """The bytes of one HTTP request."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


class Watchers:
    """The two clients that measure, each in a thread, until `end`."""

    def __init__(self, address: tuple[str, int], *, reads_streams: bool = True) -> None:
        self.probe = Gaps()
        self.stream = Gaps()
        self._address = address
        self._has_ended = threading.Event()
        works = [self._ask, *([self._read_streams] if reads_streams else [])]
        self._threads = [threading.Thread(target=work, daemon=True) for work in works]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._has_ended.set()
        for thread in self._threads:
            thread.join(CALL_LIMIT_S)

    def clear(self) -> None:
        self.probe.clear()
        self.stream.clear()

    def _ask(self) -> None:
        """Ask for short answers until the end. Each answer is read completely, since it may come in
        parts. Otherwise requests would pile up until the server ends the connection."""
        with closing(HTTPConnection(*self._address, timeout=CALL_LIMIT_S)) as connection:
            while not self._has_ended.wait(PROBE_PAUSE_S):
                with self.probe.waiting():
                    connection.request("GET", "/version")
                    connection.getresponse().read()

    def _read_streams(self) -> None:
        """One stream after the other; the wait for the first token of one does not count."""
        fields = {"prompt": "def", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
        path, body = completion(stream=True, priority=-1, **fields)
        while not self._has_ended.is_set():
            with socket.create_connection(self._address, CALL_LIMIT_S) as connection:
                connection.sendall(request(path, body))
                connection.recv(1 << 16)
                self._read_tokens(connection)

    def _read_tokens(self, connection: socket.socket) -> None:
        while not self._has_ended.is_set():
            with self.stream.waiting():
                if not connection.recv(1 << 16):
                    return


def call(address: tuple[str, int], path: str, body: bytes) -> tuple[int, int]:
    """The status and the length of the answer; nothing of it is kept."""
    with socket.create_connection(address, CALL_LIMIT_S) as connection:
        connection.sendall(request(path, body))
        buffer = bytearray(1 << 20)
        num_bytes = connection.recv_into(buffer)
        status = int(buffer[9:12])
        while count := connection.recv_into(buffer):
            num_bytes += count
    return status, num_bytes


def peak_bytes(pid: int) -> int:
    """The peak of resident memory since `forget_peak`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/{pid}/status has no VmHWM")


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def measure(server: Server, watchers: Watchers, case: str) -> Found:
    num_calls, make = CASES[case]
    requests = [make() for _ in range(num_calls)]
    address = server.host, server.port
    watchers.clear()
    time.sleep(QUIET_S)
    normal_probe_s, normal_stream_s = watchers.probe.longest_s(), watchers.stream.longest_s()
    before = resident_bytes(server.api_server)
    forget_peak(server.api_server.pid)
    watchers.clear()
    answers: list[tuple[int, int]] = []
    threads = [
        threading.Thread(
            target=lambda one: answers.append(call(address, *one)), args=(one,), daemon=True
        )
        for one in requests
    ]
    start_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(CALL_LIMIT_S)
    if len(answers) < num_calls:
        raise ServingError(f"{case}: no whole answer within {CALL_LIMIT_S:g} s")
    seconds = time.perf_counter() - start_s
    time.sleep(QUIET_S)  # what is freed at the end of a call may pause others, too
    return Found(
        case,
        *answers[0],
        seconds,
        normal_probe_s,
        watchers.probe.longest_s(),
        normal_stream_s,
        watchers.stream.longest_s(),
        before,
        peak_bytes(server.api_server.pid),
        resident_bytes(server.api_server),
    )


def report(found: Sequence[Found]) -> str:
    heads = [
        "call",
        "status; MB; s",
        "API server, ms (alone)",
        "stream, ms (alone)",
        "API server, MiB",
    ]
    rows = [
        [
            one.case,
            f"{one.status}; {one.answer_bytes / 1e6:.1f}; {one.seconds:.1f}",
            f"{one.probe_s * 1e3:.0f} ({one.normal_probe_s * 1e3:.0f})",
            f"{one.stream_s * 1e3:.0f} ({one.normal_stream_s * 1e3:.0f})",
            " -> ".join(
                f"{count / MIB:.0f}"
                for count in (one.before_bytes, one.peak_bytes, one.after_bytes)
            ),
        ]
        for one in found
    ]
    return table(heads, rows)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", help="a folder; default: the embedded model")
    add("--cases", action="append", help="only calls whose name contains this; may be repeated")
    add("--limit-ms", type=float, default=50.0)
    add("--out", type=Path, help="everything as JSON")
    add("--markdown", type=Path)
    add("--log", type=Path, default=LOG, help="the server's error output (%(default)s)")
    add("serve_arguments", nargs="*", help="for quire serve, behind --")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    arguments = [*([args.model] if args.model else []), *SERVER_ARGUMENTS, *args.serve_arguments]
    found: list[Found] = []
    try:
        with served(arguments, args.log) as server:
            watchers = Watchers((server.host, server.port))
            watchers.start()
            for case in CASES:
                if not args.cases or any(wanted in case for wanted in args.cases):
                    found.append(measure(server, watchers, case))
                    print(report(found[-1:]).splitlines()[-1], flush=True)
            watchers.end()
    except ServingError as error:
        sys.exit(f"stalls.py: error: {error}")
    text = report(found)
    print(text)
    if args.out:
        args.out.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(text + "\n")
    sys.exit(any(one.probe_s * 1e3 > args.limit_ms for one in found))


if __name__ == "__main__":
    main()
