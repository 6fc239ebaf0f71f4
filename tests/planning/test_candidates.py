"""Which configuration is best, and what is said of each."""

import re
from dataclasses import replace

import pytest
from tests.planning.costs import known_step_costs, small_shape

from quire.planning.candidates import (
    Candidate,
    Expectation,
    as_numbers,
    best_of,
    bound_of,
    expect,
    variants,
)
from quire.planning.load import read_load
from quire.planning.objectives import Objectives
from quire.planning.virtual_run import RunOutcome

BASE = Candidate("own", "auto", small_shape(), known_step_costs())


def found(rate: float, wait_s: float = 0.1, **changes: object) -> Expectation:
    """One that serves `rate` requests a second at saturation, and whose intervals are wait_s."""
    saturated = RunOutcome(ttft_s=[0.1] * 10, duration_s=10 / rate)
    served = RunOutcome(ttft_s=[0.1] * 10, itl_s=[wait_s] * 10, duration_s=1.0)
    whole = Expectation(BASE, served, saturated, 1, 1.0, 0.5)
    return replace(whole, **changes)  # type: ignore[arg-type]


def test_the_highest_rate_wins_among_candidates_that_keep_the_objectives() -> None:
    slow, fast, wild = found(4), found(9), found(20, excess=1.5)
    assert best_of([slow, fast, wild]) is fast
    assert best_of([slow, found(30, replicas=2)]) is slow
    assert best_of([wild, found(20, excess=3.0)]) is wild
    assert best_of([]) is None


def test_rates_that_nothing_tells_apart_are_equal() -> None:
    smooth, rough = found(9.9, wait_s=0.05), found(10.0, wait_s=0.2)
    assert best_of([rough, smooth]) is smooth


def test_unmeasured_and_saturated_candidates_are_not_chosen() -> None:
    slow = found(4)
    assert best_of([slow, found(90, lacking="9 rows")]) is slow
    assert best_of([found(90, lacking="9 rows")]) is None
    assert best_of([slow, found(5, offered_rate=6.0)]) is slow


def test_a_candidate_that_refuses_requests_keeps_no_objectives() -> None:
    """What is left over is served faster."""
    slow, choosy = found(4), refusing(90, 3)
    assert best_of([slow, choosy]) is slow
    assert best_of([found(4, excess=2.0), choosy]) is not choosy
    assert best_of([refusing(90, 9), choosy]) is choosy
    late = replace(refusing(95, 3), offered_rate=99.0, excess=0.1)
    many = replace(refusing(99, 3), replicas=8, excess=0.1)
    assert best_of([late, many, choosy]) is choosy, "among equals the rules are the same"


def refusing(rate: float, number: int) -> Expectation:
    one = found(rate)
    return replace(one, saturated=replace(one.saturated, num_refused=number))


def test_replicas_share_what_is_there_at_once() -> None:
    load = read_load("prompt=100,output=20,at_once,requests=40").requests
    one, four = (expect(BASE, load, Objectives(), number) for number in (1, 4))
    assert len(four.served.ttft_s) == 10 and len(four.saturated.ttft_s) == 40
    assert as_numbers(four.served)["ttft_p99_s"] < 0.5 * as_numbers(one.served)["ttft_p99_s"]
    assert four.offered_rate is None


def test_replicas_share_a_load_that_is_too_much_for_one() -> None:
    load = read_load("prompt=100,output=20,rate=100,requests=80").requests
    one = expect(BASE, load, Objectives(), 1)
    assert one.is_saturated
    some = expect(BASE, load, Objectives(), None)
    assert some.replicas > 1
    assert not some.is_saturated
    assert len(some.served.ttft_s) == -(-80 // some.replicas)
    assert as_numbers(some.served)["ttft_p99_s"] < as_numbers(one.served)["ttft_p99_s"]


def test_bounds_beyond_the_measured_are_named() -> None:
    load = read_load("prompt=1900,output=4,at_once,requests=2").requests
    shape = replace(BASE.shape, num_blocks=2000, max_num_batched_tokens=2000)
    asked = expect(replace(BASE, shape=shape), load, Objectives(), None)
    assert asked.lacking is not None and "tokens in a step (measured: 1,0" in asked.lacking


def test_the_bound_is_named() -> None:
    load = read_load("prompt=60,output=30,at_once,requests=20").requests
    words = bound_of(expect(BASE, load, Objectives(), None), load)
    assert words.startswith("step time at saturation: ")
    assert words.endswith("max_num_seqs: all 8 rows are in use")
    tight = replace(BASE, shape=replace(BASE.shape, num_blocks=60))
    load = read_load("prompt=300,output=200,at_once,requests=20").requests
    words = bound_of(expect(tight, load, Objectives(), None), load)
    assert "KV memory: 60 blocks hold 2 sequences at most" in words
    paced = replace(BASE, shape=replace(BASE.shape, max_num_seqs=64, max_itl_ratio=1.2))
    load = read_load("prompt=300,output=2,at_once,requests=60").requests
    words = bound_of(expect(paced, load, Objectives(), None), load)
    assert re.search(r"; at most \d+ sequences run: they end as others begin$", words), words


def test_variants_have_all_options_the_most_rows_first() -> None:
    options = [each.options for each in variants(BASE, (4, 16), (2.8, 0.0))]
    assert [(each["max_num_seqs"], each["max_itl_ratio"]) for each in options] == [
        (16, 2.8),
        (16, 0.0),
        (4, 2.8),
        (4, 0.0),
    ]


def test_no_interval_is_no_number() -> None:
    numbers = as_numbers(RunOutcome(ttft_s=[1.0]))
    assert numbers["itl_p50_s"] != numbers["itl_p50_s"]
    assert numbers["ttft_p50_s"] == pytest.approx(1.0)
