"""Fetches files over https from hosts that the operator allows, never from a private address.

A host is resolved once, and the connection goes to the address that was checked, so a second answer
of its name server has no effect. A call blocks; `pool` runs it in a thread.
"""

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from quire.errors import InvalidRequestError, shown
from quire.images.wrong_media import wrong_media

MAX_REDIRECTS = 3
TIMEOUT_S = 10.0
"""Seconds for one image: all redirects, the connection, and the whole answer."""

_CONNECT_TIMEOUT_S = 5.0
_SAFE = "/%:@!$&'()*+,;=~-._"
"""Characters of a path that are sent as they are (RFC 3986, section 3.3)."""

_REDIRECTS = (301, 302, 303, 307, 308)
_CARRIES_IPV4 = tuple(
    ipaddress.IPv6Network(each)
    for each in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")
)
"""Networks of IPv6 whose addresses contain an address of IPv4, which may be private: NAT64 (RFC
6052, RFC 8215), 6to4 (RFC 3056) and Teredo (RFC 4380)."""

Resolve = Callable[[str, int], Sequence[str]]
Connect = Callable[[str, int, str, float], socket.socket]


class HttpsFetcher:
    """Fetches files from a list of hosts. Threads may share a fetcher."""

    def __init__(
        self,
        domains: Sequence[str],
        *,
        resolve: Resolve | None = None,
        connect: Connect | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """domains: names of hosts, each for itself, not for its subdomains. resolve(host, port):
        the addresses of a host. connect(address, port, host, timeout_s): an encrypted connection
        to an address whose certificate names the host. None: the system's."""
        self._domains = frozenset(_plain_host(each) for each in domains)
        self._resolve = resolve or _resolve
        self._connect = connect or _connect
        self._timeout_s = timeout_s

    def fetch(self, url: str, where: str, max_bytes: int) -> bytes:
        """The body of a file. where: names the image in errors. Raises InvalidRequestError."""
        failure: InvalidRequestError
        with _Deadline(self._timeout_s) as deadline:
            try:
                for _ in range(MAX_REDIRECTS + 1):
                    found = self._get(self._checked(url, where), where, max_bytes, deadline)
                    if deadline.has_passed:  # the body may be cut
                        raise TimeoutError
                    if isinstance(found, bytes):
                        return found
                    url = urljoin(url, found)
                failure = wrong_media(where, f"has more than {MAX_REDIRECTS} redirects")
            except InvalidRequestError:
                raise
            except (OSError, http.client.HTTPException, ValueError) as error:
                # A deadline closes the socket, which ends any wait with an error.
                late = f"was not fetched within {self._timeout_s:g} s"
                reason = type(error).__name__
                is_late = deadline.has_passed or isinstance(error, TimeoutError)
                failure = wrong_media(where, late if is_late else f"can't be fetched ({reason})")
        raise failure

    def _checked(self, url: str, where: str) -> SplitResult:
        """The parts of a URL on an allowed host."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
            plain = _plain_host(host)
        except ValueError:
            raise wrong_media(where, f"has the malformed URL {shown(url)}") from None
        if parts.scheme != "https":
            raise wrong_media(
                where, f"has a URL of the scheme {shown(parts.scheme)}, but https is needed"
            )
        if parts.username is not None or parts.password is not None or port not in (None, 443):
            raise wrong_media(where, "has a URL with a user, a password or a port; leave them out")
        if not plain or plain not in self._domains:
            raise wrong_media(
                where,
                f"is on the host {shown(host)}, from which this server fetches nothing; send the"
                " image as a data: URL",
            )
        return parts

    def _get(
        self, parts: SplitResult, where: str, max_bytes: int, deadline: "_Deadline"
    ) -> bytes | str:
        """The body of one answer, or the URL to which it redirects."""
        # First, connect to an address that was checked.
        host = _plain_host(parts.hostname or "")
        opened = deadline.guard(self._open(host, where))
        connection = http.client.HTTPConnection(host, 443)
        connection.sock = opened
        with contextlib.closing(opened), contextlib.closing(connection):
            # Then ask for the file.
            path = quote(parts.path or "/", safe=_SAFE) + (f"?{parts.query}" if parts.query else "")
            headers = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "quire"}
            connection.request("GET", path, headers={"Host": host, **headers})
            with connection.getresponse() as answer:
                return _read(answer, where, max_bytes)

    def _open(self, host: str, where: str) -> socket.socket:
        addresses = list(dict.fromkeys(self._resolve(host, 443)))
        if not addresses:
            raise wrong_media(where, "can't be fetched: its host has no address")
        if not all(map(is_public, addresses)):
            raise wrong_media(where, "can't be fetched: its host has an address that is not public")
        failure: OSError | None = None
        for address in addresses[:2]:
            try:
                return self._connect(address, 443, host, min(_CONNECT_TIMEOUT_S, self._timeout_s))
            except OSError as error:
                failure = error
        assert failure is not None, "there is an address"
        raise failure


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet, and carries no other address."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        elif any(found in network for network in _CARRIES_IPV4):
            return False
    return found.is_global and not found.is_multicast and not found.is_reserved


def _read(answer: http.client.HTTPResponse, where: str, max_bytes: int) -> bytes | str:
    """The body of an answer, or the URL to which it redirects."""
    place = answer.getheader("Location")
    if answer.status in _REDIRECTS and place:
        return place
    if answer.status != 200:
        raise wrong_media(where, f"can't be fetched: its host answers {answer.status}")
    if answer.getheader("Content-Encoding", "identity").lower() != "identity":
        raise wrong_media(where, "can't be fetched: its host compresses the answer")
    if (answer.length or 0) > max_bytes:
        raise wrong_media(where, f"has {answer.length} bytes, above the bound of {max_bytes}")
    body = answer.read(max_bytes + 1)
    if len(body) > max_bytes:
        raise wrong_media(where, f"has more than {max_bytes} bytes")
    if answer.length:
        raise wrong_media(where, "can't be fetched: its host ended the answer early")
    return body


class _Deadline:
    """Closes the guarded sockets when a time is over, so that no read waits longer."""

    def __init__(self, timeout_s: float) -> None:
        self.has_passed = False
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._timer = threading.Timer(timeout_s, self._end)
        self._timer.daemon = True

    def guard(self, opened: socket.socket) -> socket.socket:
        """Close this socket at the deadline. Raises TimeoutError if that has passed."""
        with self._lock:
            self._socket = opened
            if not self.has_passed:
                return opened
        opened.close()
        raise TimeoutError

    def __enter__(self) -> "_Deadline":
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        with self._lock:
            self.has_passed = True
            if self._socket is not None:
                with contextlib.suppress(OSError):  # it may be closed already
                    self._socket.shutdown(socket.SHUT_RDWR)


def _plain_host(host: str) -> str:
    """A host's name in the form in which names are compared. Raises ValueError (UnicodeError)."""
    return host.rstrip(".").encode("idna").decode().lower() if host else ""


def _resolve(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[4][0]) for address in found]


def _connect(address: str, port: int, host: str, timeout_s: float) -> socket.socket:
    plain = socket.create_connection((address, port), timeout_s)
    try:
        return ssl.create_default_context().wrap_socket(plain, server_hostname=host)
    except BaseException:
        plain.close()
        raise
