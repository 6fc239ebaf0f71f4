"""Raises the limit of open files and computes how many connections it allows."""

import resource

from quire.errors import ConfigurationError

MAX_CONNECTIONS = 8192
"""Default maximum number of open connections. An idle connection takes about 8 KiB."""

RESERVED_FILES = 128
"""File descriptors reserved for other uses: the engine's sockets, logs, folders of adapters, /proc.
A server with one engine uses about 15."""

RESERVED_FILES_PER_REPLICA = 8

_MOST_FILES = 1 << 16
"""The limit is not raised above this, since some systems report an infinite limit but don't let a
process set it."""


def raise_open_files() -> int:
    """Raise the soft limit of open files to the hard limit; returns the new soft limit. Processes
    that are started later inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return _MOST_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def connections_allowed(max_connections: int | None, num_files: int, num_replicas: int = 1) -> int:
    """The number of connections that may be open at once.

    `max_connections` is the operator's setting; None means MAX_CONNECTIONS, or fewer if the limit
    of open files, `num_files`, is too low. Raises ConfigurationError if `num_files` leaves no room
    for the setting.
    """
    reserved = RESERVED_FILES + RESERVED_FILES_PER_REPLICA * num_replicas
    most = num_files - reserved
    if most < 1:
        raise ConfigurationError(
            f"the limit of open files is {num_files}, but the server needs {reserved} beside those"
            " of its connections; raise it (ulimit -n, or LimitNOFILE= of systemd)"
        )
    if max_connections is None:
        return min(MAX_CONNECTIONS, most)
    if max_connections > most:
        raise ConfigurationError(
            f"max_connections is {max_connections}, but the limit of open files, {num_files},"
            f" leaves room for {most}; lower it, or raise that limit (ulimit -n, or LimitNOFILE= of"
            " systemd)"
        )
    return max_connections
