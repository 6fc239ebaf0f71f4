"""That the benchmark places what it says."""

from benchmarks.routing.decisions import measure, routed

from quire.traces.trace import Trace, TraceRequest

TRACE = Trace(
    512, tuple(TraceRequest(0.1 * at, 1100, 5, (0, 1 + at % 3, 10 + at)) for at in range(40))
)


def test_chains_share_what_ids_share() -> None:
    first, fourth = routed(TRACE, 0, 16), routed(TRACE, 3, 16)
    assert len(first.digests) == 1100 // 16
    same = [a == b for a, b in zip(first.digests, fourth.digests, strict=True)]
    assert same == [True] * 64 + [False] * 4
    assert list(routed(TRACE, 0, 512).digests) == [bytes(16), (1).to_bytes(16, "big")]


def test_every_placement_is_timed() -> None:
    places, others = measure(TRACE, 3, 512, "expected_ttft")
    assert len(places) == 30 and others and min(places) > 0
