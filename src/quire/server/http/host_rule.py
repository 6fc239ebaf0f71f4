"""Decides by the Host header which calls a server answers, against DNS rebinding.

A web page of another site can make its own name lead to this machine. Its browser then treats the
answers of a server here as the page's own, and sends that name as Host. So a server that anybody on
this machine may use without a key answers only to its own names. A page can't call with a Host that
is an IP address unless it came from that address. Used by `guard`, made by `launch`.
"""

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from quire.errors import ConfigurationError

ANY_HOST = "*"

_LOCAL_NAME = "localhost"


@dataclass(frozen=True, slots=True)
class HostRule:
    """The names under which a server may be called, in lower case and without ports."""

    names: frozenset[str]

    def allows(self, host: str) -> bool:
        """Whether a call with this Host is answered: an IP address, localhost or a name below it, a
        name of `names`, or an empty Host."""
        name = _without_port(host).lower().removesuffix(".")
        if not name or name == _LOCAL_NAME or name.endswith(f".{_LOCAL_NAME}"):
            return True
        return name in self.names or _is_address(name)


def host_rule(allowed: Iterable[str], listens_on: str, *, has_keys: bool) -> HostRule | None:
    """The rule of a server; None if it answers to any name.

    `allowed` are the operator's names. Without names, only a server without keys on a loopback
    address has a rule. Keys keep strangers' pages out, and a server on the network does not know
    all names under which clients call it. `listens_on` is the name or address to listen on. Raises
    ConfigurationError for a name with a scheme, a path or a port.
    """
    names = [name.lower().removesuffix(".") for name in allowed]
    listens_on = listens_on.lower().removesuffix(".")
    for name in names:
        if name != ANY_HOST and (not name or set(name) & set("/:*@ \t")):
            raise ConfigurationError(
                f"allowed_hosts has {name!r:.80}, but needs a name such as gpu-box.example, without"
                " scheme, port and path; or * for any"
            )
    if ANY_HOST in names or (not names and (has_keys or not _is_loopback(listens_on))):
        return None
    return HostRule(frozenset([*names, listens_on]))


def _without_port(host: str) -> str:
    """The name or address of a Host header."""
    if host.startswith("["):
        name, _, rest = host[1:].partition("]")
        return name if not rest or rest.startswith(":") else host
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _is_loopback(host: str) -> bool:
    return host == _LOCAL_NAME or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
