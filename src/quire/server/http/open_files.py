"""The operating system's limit of open files, and how many connections it leaves room for."""

import resource

from quire.errors import ConfigurationError

MAX_CONNECTIONS = 8192
"""Default for the most connections open at once; an idle one takes about 8 KiB."""

RESERVED_FILES = 128
"""Descriptors kept for other uses: the engine's sockets, logs, folders of adapters, /proc. With one
engine the server itself has about 15 open."""

RESERVED_FILES_PER_REPLICA = 8

_MOST_FILES = 1 << 16
"""The limit is not raised above this: some systems report a limit that stands for infinity, but do
not let a process set it."""


def raise_open_files() -> int:
    """Raise the soft limit of open files to the hard one; returns the limit that then holds.
    Processes that are started later inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return _MOST_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def connections_allowed(max_connections: int | None, num_files: int, num_replicas: int = 1) -> int:
    """The number of connections that may be open at once.

    `max_connections` is the operator's number; None means MAX_CONNECTIONS, or fewer if the files do
    not suffice. `num_files` is the limit of open files. Raises ConfigurationError if that is too
    small.
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
