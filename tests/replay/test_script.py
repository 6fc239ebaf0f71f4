"""What a replay asks, and when."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from tests.traces.trace_cases import traces

from quire.replay.script import EMPTY, REFUSED, TOO_LONG, Due, ModelBounds, ReplayScript
from quire.traces.tokens import PromptTokens
from quire.traces.trace import Trace, TraceRequest

BOUNDS = ModelBounds(vocab_size=2**31, max_model_len=1000)
FIRST = TraceRequest(1.0, 10, 9, (0,), (1,))
TURN = TraceRequest(5.0, 22, 4, (0, 1), (2,), parent=0, think_s=2.0)
LAST = TraceRequest(9.0, 30, 4, (0, 1, 2), (), parent=1, think_s=0.5)
TALK = Trace(8, (FIRST, TURN, LAST))


def test_turns_wait_for_their_parents_and_contain_their_answers() -> None:
    script = ReplayScript(TALK, BOUNDS)
    assert script.first == [Due(0.0, 0)], "at once, whenever it came"
    prompt, answer = script.prompt(0), [*range(100, 109)]
    assert len(prompt) == 10
    assert script.end(0, 40.0, prompt, answer) == [Due(42.0, 1)]
    turn = script.prompt(1)
    assert turn[:19] == prompt + answer  # a block of it by number, and the rest that follows
    assert len(turn) == 22 and script.prompt(1) == turn
    assert script.end(1, 50.0, turn, [1, 2, 3, 4]) == [Due(50.5, 2)]
    assert script.prompt(2)[:26] == [*turn, 1, 2, 3, 4]
    assert script.end(2, 60.0, [], []) == []


def test_an_open_loop_keeps_to_the_times() -> None:
    script = ReplayScript(TALK, BOUNDS, is_closed=False)
    assert script.first == [Due(0.0, 0), Due(4.0, 1), Due(8.0, 2)]
    assert script.end(0, 40.0, script.prompt(0), [7] * 9) == []


def test_requests_that_cannot_be_sent_are_left_out_by_reason() -> None:
    """A turn whose parent is left out comes at its time."""
    requests = (
        replace(FIRST, end="refused"),
        replace(FIRST, num_prompt_tokens=0, prefix_ids=()),
        replace(FIRST, num_output_tokens=991),
        replace(TURN, parent=2),
    )
    script = ReplayScript(Trace(8, requests), BOUNDS)
    assert script.left_out == {REFUSED: 1, EMPTY: 1, TOO_LONG: 1}
    assert script.first == [Due(0.0, 3)]
    assert (script.num_requests, script.num_prompt_tokens) == (1, 22)


def test_an_answer_that_is_too_short_fills_no_block() -> None:
    script = ReplayScript(TALK, BOUNDS)
    prompt = script.prompt(0)
    script.end(0, 1.0, prompt, [5])
    assert script.prompt(1)[8:16] == PromptTokens(TALK, 2**31).prompt(1)[8:16]


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0, 0), (0.7, 110, 170), (1.0, 200, 200)])
def test_turns_behind_short_answers_go_on_with_them_as_often_as_recorded(
    share: float, low: int, high: int
) -> None:
    requests = []
    for talk in range(200):  # the answer to 10 tokens fills no block
        requests.append(TraceRequest(talk, 10, 3, (talk,)))
        requests.append(TraceRequest(talk + 0.5, 20, 1, (talk, 1000 + talk)))
    script = ReplayScript(Trace(8, tuple(requests), continued_share=share), BOUNDS)
    num_continued = 0
    for number in range(0, 400, 2):
        prompt = script.prompt(number)
        script.end(number, 0.0, prompt, [1, 2, 3])
        num_continued += script.prompt(number + 1)[:13] == [*prompt, 1, 2, 3]
    assert low <= num_continued <= high


@settings(max_examples=30)
@given(traces())
def test_every_request_becomes_due_once(trace: Trace) -> None:
    """And its prompt is as long as it was; without answers it is the trace's own."""
    script, prompts = ReplayScript(trace, BOUNDS), PromptTokens(trace, BOUNDS.vocab_size)
    waiting, seen = list(script.first), []
    while waiting:
        due = waiting.pop(0)
        prompt = script.prompt(due.number)
        assert prompt == prompts.prompt(due.number)
        seen.append(due.number)
        following = script.end(due.number, due.at_s, prompt, [])
        assert all(each.at_s >= due.at_s for each in following)
        waiting += following
    assert len(seen) == len(set(seen)) == script.num_requests
    assert script.num_requests + sum(script.left_out.values()) == len(trace.requests)


def test_tokens_are_within_the_vocabulary() -> None:
    script = ReplayScript(TALK, ModelBounds(40, 1000, first_token_id=30))
    assert {*script.prompt(2)} <= set(range(30, 40))
    with pytest.raises(IndexError):
        script.prompt(3)
