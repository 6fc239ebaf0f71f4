"""What may be said of nodes."""

from typing import Any

import pytest

from quire.errors import ConfigurationError
from quire.numa.numa_options import NumaOptions


@pytest.mark.parametrize(
    ("value", "nodes"),
    [
        ("auto", None),
        ("off", None),
        (False, None),  # YAML's off
        (1, ((1,), None)),
        ("0-1,4", ((0, 1, 4), None)),
        ("0:0-2,8", ((0,), (0, 1, 2, 8))),
    ],
)
def test_nodes_can_be_named(value: Any, nodes: object) -> None:
    assert NumaOptions(numa=value).numa_nodes == nodes


@pytest.mark.parametrize("value", ["", "all", "0:", ":0", "0:1:2", "0-", True, 1.5, -1])
def test_invalid_numa_values_are_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"numa is .*, but must be 'auto', 'off', nodes"):
        NumaOptions(numa=value)
