"""Fleets under faults: every request answered once, with the tokens that it gets alone."""

import functools
from collections import Counter

import pytest
from benchmarks.cluster import unreliable_links
from benchmarks.cluster.unreliable_links import FailoverConfig, FailoverError, FailoverWorld


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_doubled_or_wrong(seed: int) -> None:
    report = unreliable_links.run(
        FailoverConfig(seed=seed, num_engines=1 + 2 * seed, num_events=4000)
    )
    counts = report.counts
    assert counts["requests"] == counts["answered"] + counts["left"] + counts["blamed"]


def test_all_kinds_of_faults_happen() -> None:
    total: Counter[str] = Counter()
    for seed in range(10, 13):
        total += unreliable_links.run(FailoverConfig(seed=seed, num_events=7000)).counts
    for name in ("killed", "crashed", "cut", "drained", "gaps", "killed by a request", "left"):
        assert total[name], name
    assert total["messages of old connections"] and total["blamed"]


def test_a_request_that_kills_costs_two_engines_and_no_more() -> None:
    config = FailoverConfig(seed=5, num_events=8000, killed=0, crashed=0, cut=1e-9, drained=0)
    counts = unreliable_links.run(config).counts
    assert counts["blamed"] and counts["killed by a request"] <= 2.2 * counts["blamed"]


def test_a_token_that_is_delivered_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = FailoverWorld.token

    def wrong(self: FailoverWorld, request, branch, tokens):
        return original(self, request, branch, tokens) + (len(tokens) == 7)

    class Engine(unreliable_links._Engine):
        def _advance(self, key):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(FailoverWorld, "token", wrong)
                return super()._advance(key)

    monkeypatch.setattr(unreliable_links, "_Engine", Engine)
    with pytest.raises(FailoverError, match="token 7 is"):
        unreliable_links.run(FailoverConfig(num_events=5000))


def test_a_run_replays_exactly() -> None:
    config = FailoverConfig(seed=3, num_events=2500)
    assert unreliable_links.run(config).counts == unreliable_links.run(config).counts


def test_the_command_runs_until_the_given_number_of_events(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = functools.partial(FailoverConfig, num_events=1000)
    monkeypatch.setattr(unreliable_links, "FailoverConfig", short)
    assert unreliable_links.main(["--num-events", "2500", "--num-engines", "2"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("2 runs: ") and "answered once" in told
