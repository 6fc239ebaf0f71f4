"""How many connections the limit of open files leaves room for, and how it is raised."""

import resource

import pytest

from quire.errors import ConfigurationError
from quire.server.http import open_files
from quire.server.http.open_files import (
    MAX_CONNECTIONS,
    RESERVED_FILES,
    RESERVED_FILES_PER_REPLICA,
    connections_allowed,
    raise_open_files,
)

RESERVED = RESERVED_FILES + RESERVED_FILES_PER_REPLICA


@pytest.mark.parametrize(
    ("asked", "num_files", "expected"),
    [
        (None, 1024, 1024 - RESERVED),
        (None, 65536, MAX_CONNECTIONS),
        (20_000, 65536, 20_000),
        (None, RESERVED + 1, 1),
        (100, 1024, 100),
    ],
)
def test_files_for_all_else_are_kept(asked, num_files, expected):
    assert connections_allowed(asked, num_files) == expected


def test_each_replica_needs_files_of_its_own():
    one, four = (connections_allowed(None, 1024, number) for number in (1, 4))
    assert one - four == 3 * RESERVED_FILES_PER_REPLICA


def test_connections_beyond_the_limit_of_open_files_are_refused():
    with pytest.raises(ConfigurationError, match="max_connections is 1000, but the limit of open"):
        connections_allowed(1000, 1024)
    with pytest.raises(ConfigurationError, match="the limit of open files is 64, but the server"):
        connections_allowed(None, 64)


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (1024, 4096, 4096),
        (1024, 1 << 20, 65536),
        (1 << 18, 1 << 20, 1 << 18),  # the operator's own
        (1024, resource.RLIM_INFINITY, 65536),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 65536),
        (1024, 1024, 1024),
    ],
)
def test_the_soft_limit_is_raised_to_the_hard_one(monkeypatch, soft, hard, expected):
    limits = [(soft, hard)]

    class FakeResource:
        RLIMIT_NOFILE, RLIM_INFINITY = resource.RLIMIT_NOFILE, resource.RLIM_INFINITY

        @staticmethod
        def getrlimit(which):
            assert which == resource.RLIMIT_NOFILE
            return limits[-1]

        @staticmethod
        def setrlimit(which, new):
            limits.append(new)

    monkeypatch.setattr(open_files, "resource", FakeResource)
    assert raise_open_files() == expected
    changed = [] if expected in (soft, limits[0][0]) or soft == -1 else [(expected, hard)]
    assert limits[1:] == changed
