"""Who is resumed from where, who is to blame, and when to give up: decided without any process."""

import dataclasses
import random
from typing import Any

import pytest

from quire.core.request import FinishReason, Request, ResumedBranch, SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.engine.recovery import (
    NUM_PROOF_TOKENS,
    OpenRequest,
    RecoveryConfig,
    RestartBudget,
    Roster,
)
from quire.errors import ConfigurationError

# ---- when to give up ----------------------------------------------------------------------------

CONFIG = RecoveryConfig(max_restarts=3, window_s=100.0, first_backoff_s=0.5, max_backoff_s=1.5)


def delays(*deaths: tuple[float, bool], config: RecoveryConfig = CONFIG) -> list[float | None]:
    budget = RestartBudget(config)
    return [budget.note_death(now_s, is_explained=explained) for now_s, explained in deaths]


@pytest.mark.parametrize(
    ("deaths", "expected"),
    [
        ([(0, False), (1, False), (2, False), (3, False)], [0.0, 0.5, 1.0, None]),
        # Out of the window, a death counts no more.
        ([(0, False), (50, False), (99, False), (100, False)], [0.0, 0.5, 1.0, 1.0]),
        ([(0, False), (300, False), (600, False)], [0.0, 0.0, 0.0]),
        # Who is to blame for a death is to blame for the one before it.
        ([(0, False), (1, True), (2, False), (3, True), (4, False)], [0.0, 0.0, 0.0, 0.0, 0.0]),
        ([(0, False), (1, False), (2, True), (3, False)], [0.0, 0.5, 0.0, 0.5]),
        ([(0, True), (1, True)], [0.0, 0.0]),
    ],
)
def test_how_long_to_wait_before_the_next_start(
    deaths: list[tuple[float, bool]], expected: list[float | None]
) -> None:
    assert delays(*deaths) == expected


def test_the_wait_is_bounded_and_no_restart_may_be_allowed() -> None:
    config = dataclasses.replace(CONFIG, max_restarts=9)
    assert delays(*((0.0, False) for _ in range(6)), config=config)[-3:] == [1.5, 1.5, 1.5]
    assert delays((0.0, False), config=dataclasses.replace(CONFIG, max_restarts=0)) == [None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_restarts": -1}, "max_restarts is -1"),
        ({"window_s": 0.0}, "window_s is 0.0, but must be above 0"),
        ({"heartbeat_timeout_s": -1.0}, "heartbeat_timeout_s is -1.0"),
        ({"first_backoff_s": 50.0}, "first_backoff_s is 50.0 and max_backoff_s 30.0"),
    ],
)
def test_bad_patience_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RecoveryConfig(**options)


# ---- what came so far ---------------------------------------------------------------------------


def make(name: str = "r", n: int = 1, **params: Any) -> OpenRequest:
    return OpenRequest(Request(name, [1], DecodingParams(99, **params), n=n), accepted_s=10.0)


def bring(
    one: OpenRequest, branch: int = 0, *token_ids: int, end: FinishReason | None = None
) -> bool:
    return one.take(SequenceOutput(one.request_id, branch, token_ids or (7,), finish_reason=end))


def test_a_request_goes_on_from_the_tokens_that_came() -> None:
    one = make(n=3, prompt_logprobs=1)
    assert one.to_send(10.0) == one.request
    assert bring(one, 1, 5, 6) and bring(one, 1, 7) and bring(one, 2, 9, end=FinishReason.STOP)
    again = one.to_send(11.0)
    assert again.resumed == (ResumedBranch(0), ResumedBranch(1, (5, 6, 7)))
    assert again.params.prompt_logprobs is None
    assert not bring(one, 2, 4), "nothing is wanted after the end"
    assert one.drop(1) == 1 and one.drop(1) == 0 and one.drop(None) == 1
    assert not one.branches and not bring(one, 1, 3)


def test_a_branch_that_fails_without_a_token_brings_nothing() -> None:
    one = make(n=2, prompt_logprobs=1)
    one.take(SequenceOutput("r", 0, (), finish_reason=FinishReason.ERROR, error="NaN"))
    assert one.to_send(10.0).params.prompt_logprobs == 1


# ---- who is to blame ----------------------------------------------------------------------------


def send_all(roster: Roster) -> list[str]:
    found = []
    while (one := roster.next_to_send()) is not None:
        found.append(one.request_id)
    return found


def with_all_sent(*requests: OpenRequest) -> Roster:
    roster = Roster()
    for one in requests:
        roster.add(one)
    assert send_all(roster) == [one.request_id for one in requests]
    assert roster.is_idle and all(map(roster.is_sent, requests))
    return roster


def prove(one: OpenRequest) -> None:
    for branch in list(one.branches):
        for _ in range(NUM_PROOF_TOKENS):
            bring(one, branch)


def test_suspects_are_tried_one_after_the_other_and_new_ones_wait() -> None:
    a, b, new = make("a"), make("b", n=2), make("new")
    roster = with_all_sent(a, b)
    bring(a)
    assert roster.on_death() is None
    roster.add(new)
    assert not roster.is_idle and not roster.is_sent(a)
    assert send_all(roster) == ["a"]
    bring(a)
    assert send_all(roster) == [], "one token may not be all that was lost"
    bring(a)
    assert send_all(roster) == ["b"]
    prove(b)
    assert send_all(roster) == ["new"]
    assert roster.is_idle


def test_a_death_during_a_trial_blames_the_one_on_trial_alone() -> None:
    a, b, c, new = (make(name) for name in ("a", "b", "c", "new"))
    roster = with_all_sent(a, b, c)
    roster.on_death()
    send_all(roster)
    prove(a)
    assert send_all(roster) == ["b"]
    roster.add(new)
    assert roster.on_death() is b
    roster.end(b)
    assert send_all(roster) == ["a", "c"], "the cleared one beside the next on trial"
    prove(c)
    assert send_all(roster) == ["new"]
    assert roster.on_death() is None, "nobody was on trial: all are suspects again"
    assert send_all(roster) == ["a"]


def test_a_death_while_the_process_starts_changes_nothing() -> None:
    a, b = make("a"), make("b")
    roster = with_all_sent(a, b)
    roster.on_death()
    assert roster.on_death() is None
    assert roster.on_death() is None
    assert send_all(roster) == ["a"]


def test_whoever_ends_on_trial_makes_room_for_the_next() -> None:
    a, b = make("a"), make("b")
    roster = with_all_sent(a, b)
    roster.on_death()
    send_all(roster)
    bring(a, end=FinishReason.STOP)
    roster.end(a)
    assert send_all(roster) == ["b"]


def test_whoever_has_left_is_not_sent_again() -> None:
    a, b, c = make("a"), make("b"), make("c")
    roster = with_all_sent(a, b)
    roster.add(c)
    b.drop(None)
    assert not roster.leave(b)
    c.drop(None)
    assert not roster.leave(c)
    roster.on_death()
    assert send_all(roster) == ["a"]
    prove(a)
    assert send_all(roster) == [] and roster.is_idle


def test_whoever_leaves_on_trial_is_still_to_blame_until_it_is_out_of_the_process() -> None:
    a, b = make("a"), make("b")
    roster = with_all_sent(a, b)
    roster.on_death()
    send_all(roster)
    a.drop(None)
    assert roster.leave(a)
    assert send_all(roster) == [], "the process may still compute it"
    assert roster.on_death() is a
    assert send_all(roster) == ["b"]
    b.drop(None)
    assert roster.leave(b)
    roster.clear(b)
    assert roster.on_death() is None


def test_branches_that_had_not_begun_need_not_prove_anything() -> None:
    one = make("a", n=3)
    roster = with_all_sent(one, make("b"))
    bring(one, 0), bring(one, 1)
    roster.on_death()
    send_all(roster)
    bring(one, 0, 1, 2)
    assert send_all(roster) == []
    bring(one, 1, 1, 2)
    assert send_all(roster) == ["b"]


def test_of_a_request_that_had_not_begun_one_branch_proves_it() -> None:
    one = make("a", n=3)
    roster = with_all_sent(one, make("b"))
    roster.on_death()
    send_all(roster)
    bring(one, 2, 1, 2)
    assert send_all(roster) == ["b"]


def test_branches_that_end_on_trial_prove_themselves() -> None:
    one = make("a", n=2)
    roster = with_all_sent(one, make("b"))
    bring(one, 0), bring(one, 1)
    roster.on_death()
    send_all(roster)
    bring(one, 0, end=FinishReason.STOP)
    assert send_all(roster) == []
    bring(one, 1, 1, 2)
    assert send_all(roster) == ["b"]


def test_beam_searches_are_tried_last_and_new_ones_do_not_wait_for_them() -> None:
    beams = [make(name, n=2, beam_width=2) for name in ("x", "y")]
    a, new = make("a"), make("new")
    roster = with_all_sent(*beams, a)
    roster.on_death()
    roster.add(new)
    assert send_all(roster) == ["a"]
    prove(a)
    assert send_all(roster) == ["x"]
    beams[0].drop(None)
    roster.end(beams[0])
    assert send_all(roster) == ["y", "new"]
    assert roster.on_death() is beams[1]
    assert send_all(roster) == ["a", "new"]


@pytest.mark.parametrize("num_guilty", [0, 1, 3])
@pytest.mark.parametrize("seed", range(10))
def test_the_guilty_end_and_everybody_is_answered(seed: int, num_guilty: int) -> None:
    """A model of the process: it dies in the step that computes a guilty one's n-th token."""
    rng = random.Random(seed)
    requests = [make(f"r{index}", n=rng.randint(1, 3)) for index in range(12)]
    guilty = {one.request_id: rng.randint(0, 6) for one in rng.sample(requests, num_guilty)}
    waiting, running, roster = list(requests), [], Roster()
    num_deaths = dict.fromkeys((one.request_id for one in requests), 0)
    ended: list[str] = []
    blamed: list[str] = []
    for _ in range(2000):
        if waiting and rng.random() < 0.4:
            roster.add(waiting.pop())
        while (one := roster.next_to_send()) is not None:
            running.append(one)
        if any(length_of(one) >= guilty.get(one.request_id, 999) for one in running):
            for one in running:
                num_deaths[one.request_id] += 1
            running = []
            out = roster.on_death()
            if out is not None:
                blamed.append(out.request_id)
                out.drop(None)
                roster.end(out)
            continue
        for one in running:
            is_last = length_of(one) >= 8
            for branch in list(one.branches):
                bring(one, branch, end=FinishReason.LENGTH if is_last else None)
            if not one.branches:
                roster.end(one)
                ended.append(one.request_id)
        running = [one for one in running if one.branches]
    assert sorted(ended + blamed) == sorted(num_deaths), "everybody is answered, once"
    assert set(guilty) <= set(blamed)
    assert all(num_deaths[name] >= 2 for name in blamed)
    if num_guilty < 2:  # of several, one may kill while an innocent one is on trial
        assert set(blamed) == set(guilty)
        assert all(num_deaths[name] == 2 for name in guilty)


def length_of(one: OpenRequest) -> int:
    return max(map(len, one.branches.values()))
