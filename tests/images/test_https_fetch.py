"""Only public addresses of allowed hosts are connected to, and every wait is bounded."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from quire.errors import InvalidRequestError
from quire.images.https_fetch import HttpsFetcher, is_public

PUBLIC = "93.184.215.14"
WHERE = "messages[0].content[0]"
Serve = Callable[[socket.socket], None]


class Host:
    """Hosts in this process: each connection is a pair of sockets, without encryption."""

    def __init__(self, serve: Serve, addresses: Sequence[str] = (PUBLIC,)) -> None:
        self.serve = serve
        self.addresses = addresses
        #: The addresses and hosts of all connections.
        self.connected: list[tuple[str, str]] = []
        self._open: list[socket.socket] = []

    def resolve(self, host: str, port: int) -> Sequence[str]:
        return self.addresses

    def connect(self, address: str, port: int, host: str, timeout_s: float) -> socket.socket:
        self.connected.append((address, host))
        ours, theirs = socket.socketpair()
        self._open.append(theirs)
        threading.Thread(target=self._run, args=(theirs,), daemon=True).start()
        return ours

    def fetcher(self, *domains: str, timeout_s: float = 5.0) -> HttpsFetcher:
        return HttpsFetcher(
            domains, resolve=self.resolve, connect=self.connect, timeout_s=timeout_s
        )

    def close(self) -> None:
        for each in self._open:
            each.close()

    def _run(self, connection: socket.socket) -> None:
        try:
            while b"\r\n\r\n" not in connection.recv(1 << 16):
                pass
            self.serve(connection)
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass


def answer(head: str, body: bytes = b"") -> Serve:
    return lambda connection: connection.sendall(f"HTTP/1.1 {head}\r\n\r\n".encode() + body)


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host(answer("200 OK\r\nContent-Length: 5", b"image"))
    yield made
    made.close()


def refusal(fetcher: HttpsFetcher, url: str, max_bytes: int = 1000) -> str:
    with pytest.raises(InvalidRequestError) as refused:
        fetcher.fetch(url, WHERE, max_bytes)
    assert refused.value.param == "messages" and "\n" not in str(refused.value)
    return str(refused.value)


def test_a_file_is_fetched_from_the_checked_address(host: Host) -> None:
    fetcher = host.fetcher("Example.com")
    assert fetcher.fetch("https://example.com/a.png?b=1", WHERE, 5) == b"image"
    assert fetcher.fetch("https://EXAMPLE.com.:443", WHERE, 5) == b"image"
    assert host.connected == [(PUBLIC, "example.com")] * 2


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://example.com/", "but https is needed"),
        ("https://example.com:8443/", "with a user, a password or a port"),
        ("https://user@example.com/", "with a user, a password or a port"),
        ("https://example.com:x/", "malformed"),
        ("https://[::1/", "malformed"),
        ("https://evil.example.com/", "fetches nothing"),
        ("https://example.com.evil.org/", "fetches nothing"),
        ("https://example.com@evil.org/", "with a user"),
        ("https://127.0.0.1/", "fetches nothing"),
        ("https:///a", "fetches nothing"),
    ],
)
def test_only_the_listed_hosts_are_asked(host: Host, url: str, reason: str) -> None:
    assert reason in refusal(host.fetcher("example.com"), url)
    assert host.connected == []


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0"),
        *("100.64.0.1", "224.0.0.1", "255.255.255.255", "198.18.0.1", "192.0.2.1"),
        *("::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1"),
        *("64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:7f00:1::", "fe80::1%eth0", "x"),
    ],
)
def test_no_private_address_is_connected_to(host: Host, address: str) -> None:
    assert not is_public(address)
    host.addresses = [PUBLIC, address]
    assert "an address that is not public" in refusal(
        host.fetcher("example.com"), "https://example.com/"
    )
    assert host.connected == []


def test_public_addresses_are_known() -> None:
    assert is_public(PUBLIC) and is_public("2606:2800:21f:cb07:6820:80da:af6b:8b2c")
    assert is_public(f"::ffff:{PUBLIC}")


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("https://evil.org/", "fetches nothing"),
        ("http://example.com/", "but https is needed"),
        ("file:///etc/passwd", "but https is needed"),
        ("//127.0.0.1/", "fetches nothing"),
        ("/again", "has more than 3 redirects"),
    ],
)
def test_redirects_are_checked_like_first_urls(host: Host, place: str, reason: str) -> None:
    host.serve = answer(f"302 Found\r\nLocation: {place}\r\nContent-Length: 0")
    assert reason in refusal(host.fetcher("example.com"), "https://example.com/")


@pytest.mark.parametrize(
    ("serve", "reason"),
    [
        (answer("404 Not Found\r\nContent-Length: 0"), "answers 404"),
        (answer("200 OK\r\nContent-Length: 1001"), "has 1001 bytes, above the bound of 1000"),
        (answer("200 OK", bytes(1001)), "has more than 1000 bytes"),
        (answer("200 OK\r\nContent-Length: 9", b"short"), "ended the answer early"),
        (answer("200 OK\r\nContent-Encoding: gzip", b"x"), "compresses the answer"),
        (answer("200 OK\r\nX: " + "y" * 70000), "can't be fetched (LineTooLong)"),
        (answer("200 OK" + "\r\nX: y" * 200), "can't be fetched (HTTPException)"),
        (lambda connection: connection.sendall(b"garbage\r\n\r\n"), "(BadStatusLine)"),
        (lambda connection: None, "can't be fetched (RemoteDisconnected)"),
    ],
)
def test_hostile_answers_are_refused(host: Host, serve: Serve, reason: str) -> None:
    host.serve = serve
    assert reason in refusal(host.fetcher("example.com"), "https://example.com/")


def test_a_slow_host_is_left_at_the_deadline(host: Host) -> None:
    def drip(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:  # ends with the connection
            connection.sendall(b"x")
            connection.settimeout(0.01)
            try:
                connection.recv(1)
                return
            except TimeoutError:
                pass

    host.serve = drip
    begin_s = time.monotonic()
    reason = refusal(host.fetcher("example.com", timeout_s=0.2), "https://example.com/", 10**6)
    assert "was not fetched within 0.2 s" in reason
    assert time.monotonic() - begin_s < 20  # on a quiet machine, 0.2
