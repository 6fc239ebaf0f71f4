"""50 hostile URLs, and the hosts that they name, which listen on this machine's loopback address.

Names are resolved to public addresses, since private ones are refused before a connection; the
connection then goes to a port of this process, without encryption.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

from benchmarks.images.hostile_files import picture, saved

PUBLIC = "93.184.215.14"
PRIVATE = {
    "loopback": "127.0.0.1",
    "loopback-six": "::1",
    "mapped": "::ffff:127.0.0.1",
    "nat64": "64:ff9b::7f00:1",
    "private-ten": "10.0.0.1",
    "private-172": "172.16.3.4",
    "private-192": "192.168.0.1",
    "metadata": "169.254.169.254",
    "link-local": "fe80::1",
    "unique-local": "fd00::1",
    "carrier": "100.64.1.1",
    "any": "0.0.0.0",
    "multicast": "224.0.0.251",
    "broadcast": "255.255.255.255",
    "six-to-four": "2002:7f00:1::",
}
"""Host -> its address, which must not be connected to."""

Serve = Callable[[socket.socket, threading.Event], None]


def _head(lines: str, body: bytes = b"") -> Serve:
    data = f"HTTP/1.1 {lines}\r\n\r\n".encode() + body
    return lambda connection, _: connection.sendall(data)


def _redirect(place: str) -> Serve:
    return _head(f"302 Found\r\nLocation: {place}\r\nContent-Length: 0")


def _drip(start: bytes, piece: bytes) -> Serve:
    def serve(connection: socket.socket, is_over: threading.Event) -> None:
        connection.sendall(start)
        while not is_over.wait(0.05):
            connection.sendall(piece)

    return serve


def _flood(connection: socket.socket, is_over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while not is_over.is_set():
        connection.sendall(bytes(1 << 20))


SERVED: dict[str, Serve] = {
    "good": _head("200 OK", saved(picture())),
    "to-loopback": _redirect("https://loopback.test/"),
    "to-metadata": _redirect("https://metadata.test/latest"),
    "to-file": _redirect("file:///etc/passwd"),
    "to-http": _redirect("http://good.test/"),
    "to-stranger": _redirect("https://stranger.org/"),
    "to-itself": _redirect("/again"),
    "to-garbage": _redirect("https://[::1"),
    "to-data": _redirect("data:image/png;base64,aGk="),
    "silent": _drip(b"", b""),
    "slow-head": _drip(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
    "slow-body": _drip(b"HTTP/1.1 200 OK\r\n\r\n", b"x"),
    "slow-continue": _drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "flood": _flood,
    "long-line": _head("200 OK\r\nX: " + "y" * (1 << 20)),
    "many-heads": _head("200 OK" + "\r\nX: y" * 10000),
    "large": _head("200 OK\r\nContent-Length: 99999999999"),
    "negative": _head("200 OK\r\nContent-Length: -1", b"x"),
    "early-end": _head("200 OK\r\nContent-Length: 999", b"x"),
    "chunks": _head("200 OK\r\nTransfer-Encoding: chunked", b"ffffffffff\r\nx"),
    "gzip": _head("200 OK\r\nContent-Encoding: gzip", b"\x1f\x8b"),
    "garbage": lambda connection, _: connection.sendall(os.urandom(5000)),
    "nothing": lambda connection, _: None,
    "html": _head("200 OK\r\nContent-Type: image/png", b"<html></html>"),
    "error": _head("500 Oops\r\nContent-Length: 0"),
}


class HostileHosts:
    """The hosts, and a folder of files. Leaving `with` ends them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "images"
        self.folder.mkdir()
        (folder / "secret").write_bytes(saved(picture()))
        (self.folder / "out").symlink_to(folder / "secret")
        (self.folder / "loop").symlink_to("loop")
        os.mkfifo(self.folder / "pipe")
        self.domains = tuple(f"{name}.test" for name in (*SERVED, *PRIVATE))
        self._is_over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._connecting = threading.Lock()

    def resolve(self, host: str, port: int) -> Sequence[str]:
        """The address of a host."""
        return [PRIVATE.get(host.removesuffix(".test"), PUBLIC)]

    def connect(self, address: str, port: int, host: str, timeout_s: float) -> socket.socket:
        """A connection to the host of this process."""
        assert address == PUBLIC, f"connected to {address}"
        with self._connecting:  # else another thread could accept this connection
            client = socket.create_connection(self._listener.getsockname(), timeout_s)
            server, _ = self._listener.accept()
        serve = SERVED[host.removesuffix(".test")]
        threading.Thread(target=self._run, args=(server, serve), daemon=True).start()
        return client

    def _run(self, connection: socket.socket, serve: Serve) -> None:
        with contextlib.suppress(OSError), connection:
            connection.recv(1 << 16)
            serve(connection, self._is_over)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._listener.close()


def hostile_urls(hosts: HostileHosts) -> Iterator[tuple[str, str]]:
    """The name and the URL of each of 50 images."""
    for name in (*SERVED, *PRIVATE):
        yield name, f"https://{name}.test/image.png"
    folder = hosts.folder
    yield "file outside", "file:///etc/passwd"
    yield "percent-encoded way out", f"file://{folder}/%2e%2e/secret"
    yield "link out", f"file://{folder}/out"
    yield "loop of links", f"file://{folder}/loop"
    yield "pipe", f"file://{folder}/pipe"
    yield "null character", f"file://{folder}/a%00.png"
    yield "port", "https://good.test:22/"
    yield "user", "https://good.test@127.0.0.1/"
    yield "address as a number", "https://2130706433/"
    yield "other scheme", "gopher://good.test/"
