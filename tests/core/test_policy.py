"""Policies as tables: sequences and the order in which they go."""

import pytest
from tests.core.harness import Harness

from quire.core.policy import POLICIES, find_policy
from quire.core.sampling_params import DecodingParams
from quire.core.sequence import Sequence
from quire.errors import ConfigurationError

ARRIVED = [("a", 3), ("b", 1), ("c", 3), ("d", -2), ("e", 1)]


@pytest.mark.parametrize(
    ("policy", "order"),
    [("fcfs", ["a", "b", "c", "d", "e"]), ("priority", ["d", "b", "e", "a", "c"])],
)
def test_who_goes_first(policy: str, order: list[str]) -> None:
    harness = Harness(policy=find_policy(policy))
    for name, priority in ARRIVED:
        harness.add(name, 2, priority=priority)
    assert [sequence.request_id for sequence in harness.scheduler.waiting] == order


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_key_reads_nothing_that_changes(policy: str) -> None:
    sequence = Sequence("r", [1, 2], DecodingParams(9), priority=4)
    before = POLICIES[policy](sequence)
    sequence.append(5)
    sequence.num_computed_tokens = 2
    assert POLICIES[policy](sequence) == before


def test_an_unknown_policy_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigurationError, match="'sjf', but must be one of fcfs, priority"):
        find_policy("sjf")
