"""Requests go to the replica that has their prefix, by tokens and contents."""

from dataclasses import replace

from tests.engine_client.fleet_world import LIMITS

from quire.cluster.placement import RoutedPlacement
from quire.core.content_spans import ContentSpan
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.routing.policies.longest_match import LongestMatch

FACTS = {"num_blocks": 64, "block_size": 64, "max_num_batched_tokens": 256, "max_num_seqs": 4}


def test_equal_placeholders_of_other_contents_are_no_common_prefix() -> None:
    placement = RoutedPlacement(LongestMatch(), lambda: 0.0)
    for name in "ab":
        placement.add(name, LIMITS, FACTS)
    spans = [(ContentSpan(3, 90, digest * 16),) for digest in ("0a", "0b")]
    first = Request("r0", [7] * 128, DecodingParams(4), content_spans=spans[0])
    home = placement.place(first)
    other = placement.place(replace(first, request_id="r1", content_spans=spans[1]))
    assert {home, other} == {"a", "b"}, "without a common prefix, the idle replica is chosen"
    for number in range(2, 6):
        again = replace(first, request_id=f"r{number}", content_spans=spans[number % 2])
        assert placement.place(again) == (home, other)[number % 2]
