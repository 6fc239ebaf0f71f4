"""A trace's own rules, and what is made of it: the first of it, another speed, copies."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.traces.trace_cases import traces

from quire.errors import ConfigurationError
from quire.traces.trace import Trace, TraceRequest

PLAIN = TraceRequest(1.0, 20, 5, (0, 1))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"at_s": -1.0}, "at_s is -1.0"),
        ({"at_s": float("nan")}, "at_s is nan"),
        ({"think_s": float("inf")}, "think_s is inf"),
        ({"num_prompt_tokens": -1}, "num_prompt_tokens is -1"),
        ({"num_output_tokens": 2**31}, "num_output_tokens is 2147483648"),
        ({"tenant": -1}, "tenant is -1"),
        ({"prefix_ids": (0, 1, 2, 3)}, "it has 4 prefix ids, but 20 prompt tokens"),
        ({"output_ids": (1,)}, "occurs twice"),
        ({"prefix_ids": (-1,)}, "prefix id -1 must be between 0 and"),
        ({"prefix_ids": (2**41,)}, "prefix id 2199023255552 must be between 0 and"),
        ({"end": "bored"}, "its end is 'bored'"),
    ],
)
def test_a_request_says_what_is_wrong_with_it(changes: dict[str, object], why: str) -> None:
    PLAIN.check(8)
    with pytest.raises(ValueError, match=why):
        replace(PLAIN, **changes).check(8)  # type: ignore[arg-type]


def test_requests_are_in_order_and_parents_before() -> None:
    with pytest.raises(ConfigurationError, match=r"request 1 of the trace arrived at 1\.0 s, but"):
        Trace(8, (replace(PLAIN, at_s=2.0), PLAIN))
    with pytest.raises(ConfigurationError, match="request 0 of the trace has the parent 0"):
        Trace(8, (replace(PLAIN, parent=0),))
    with pytest.raises(ConfigurationError, match="block_tokens is 0"):
        Trace(0, ())
    with pytest.raises(ConfigurationError, match="continued_share is 2"):
        Trace(8, (), continued_share=2)
    with pytest.raises(ConfigurationError, match="shared_tail_tokens is 8"):
        Trace(8, (), shared_tail_tokens=8)


@settings(max_examples=20)
@given(traces(), st.integers(0, 9), st.sampled_from([0.5, 1.0, 3.0]))
def test_the_first_at_another_speed(trace: Trace, count: int, speed: float) -> None:
    changed = trace.first(count).at_speed(speed)
    assert len(changed.requests) == min(count, len(trace.requests))
    for old, new in zip(trace.requests, changed.requests, strict=False):
        assert new == replace(old, at_s=old.at_s / speed)
    with pytest.raises(ConfigurationError, match="speed is 0"):
        trace.at_speed(0)


@settings(max_examples=20)
@given(traces(), st.integers(0, 3))
def test_copies_share_nothing(trace: Trace, num_copies: int) -> None:
    copied = trace.repeated(num_copies)
    assert len(copied.requests) == num_copies * len(trace.requests)
    if not num_copies:
        return
    assert copied.best_hit_rate() == pytest.approx(trace.best_hit_rate())
    seen: list[set[int]] = []
    for copy in range(num_copies):
        mine = copied.requests[copy::num_copies]
        seen.append({each for one in mine for each in one.prefix_ids + one.output_ids})
        for old, new in zip(trace.requests, mine, strict=True):
            assert (new.at_s, new.num_prompt_tokens) == (old.at_s, old.num_prompt_tokens)
            if old.parent is not None:
                assert new.parent == old.parent * num_copies + copy
    assert len(set.union(*seen)) == sum(map(len, seen))


def test_the_best_hit_rate_counts_tokens_and_answers() -> None:
    requests = (
        TraceRequest(0.0, 20, 10, (0, 1), (2,)),
        TraceRequest(1.0, 30, 1, (0, 1, 2)),  # continues the first: 24 of 30 are known
        TraceRequest(2.0, 10, 0, (5,), end="refused"),  # never computed
        TraceRequest(3.0, 10, 1, (5,)),
        TraceRequest(4.0, 10, 1, (5, 6)),  # the last block in part, as in Mooncake's format
        TraceRequest(5.0, 10, 1, (5, 6)),
    )
    assert Trace(8, requests).best_hit_rate() == pytest.approx((24 + 8 + 10) / 90)
    assert Trace(8, requests).duration_s == 5.0
    assert Trace(8, ()).best_hit_rate() == 0.0
    assert Trace(8, ()).duration_s == 0.0
