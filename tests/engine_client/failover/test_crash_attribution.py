"""Which request is to blame for the deaths of engines."""

import signal

import pytest
from tests.engine_client.failover.one_engine_world import End

from quire.core.request import Request, SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.engine_client.failover.crash_attribution import (
    NUM_PROOF_TOKENS,
    CrashAttribution,
    FleetVerdict,
)
from quire.engine_client.process.activity import Activity, Doing
from quire.engine_client.recovery import Death
from quire.engine_client.request_book import OpenRequest, RequestStream

CRASH = -int(signal.SIGSEGV)
KILLED = -int(signal.SIGKILL)


def opened(name: str, num_tokens: int = 0, beam_width: int = 0) -> OpenRequest:
    """A request with this many tokens so far."""
    params = DecodingParams(max_tokens=100, beam_width=beam_width)
    stream = RequestStream(lambda *_: None, {name}, End())
    request = OpenRequest(Request(name, [1], params), 0.0, stream)
    if num_tokens:
        request.record_output(SequenceOutput(name, 0, (7,) * num_tokens))
    return request


def death(*requests: OpenRequest, status: int = CRASH, is_lost: bool = False) -> Death:
    """A death in a step of these requests. A kill counts as lack of memory."""
    ids = frozenset(request.request_id for request in requests)
    return Death(Activity(Doing.COMPUTING, ids), status, is_lost=is_lost)


def judge(attribution: CrashAttribution, death: Death, requests: list[OpenRequest]) -> FleetVerdict:
    """The verdict on the death of an engine that had these requests."""
    return attribution.on_death(death, requests, had_trial=attribution.trial in requests)


def test_only_requests_of_the_last_step_are_suspects() -> None:
    attribution, in_step, beside = CrashAttribution(), opened("in_step"), opened("beside")
    verdict = judge(attribution, death(in_step), [in_step, beside])
    assert verdict.blamed is None and verdict.continuing == [beside]
    assert attribution.num_waiting == 1 and attribution.next_trial() is in_step
    assert attribution.next_trial() is None, "one request is on trial at a time"


def test_suspects_with_the_least_output_are_tried_first_and_beam_searches_last() -> None:
    attribution = CrashAttribution()
    long, beam, short = opened("long", 9), opened("beam", 0, beam_width=2), opened("short", 1)
    judge(attribution, death(long, beam, short), [long, beam, short])
    order = []
    while (request := attribution.next_trial()) is not None:
        order.append(request)
        attribution.remove(request)
    assert order == [short, long, beam]


def test_suspect_is_cleared_when_it_has_repeated_its_tokens_and_two_more() -> None:
    attribution, suspect = CrashAttribution(), opened("suspect", 3)
    judge(attribution, death(suspect), [suspect])
    assert attribution.next_trial() is suspect
    for number in range(NUM_PROOF_TOKENS):
        assert not attribution.note_output(suspect)
        suspect.record_output(SequenceOutput("suspect", 0, (number,)))
    assert attribution.note_output(suspect) and attribution.trial is None


@pytest.mark.parametrize(("status", "num_deaths"), [(CRASH, 1), (KILLED, 2)])
def test_deaths_on_its_trial_that_convict_a_request(status: int, num_deaths: int) -> None:
    """One for a crash; two for lack of memory, which another program may have caused."""
    attribution, guilty, other = CrashAttribution(), opened("guilty"), opened("other", 1)
    deaths = [death(guilty, other, status=status)]
    judge(attribution, deaths[0], [guilty, other])
    for number in range(num_deaths):
        while (tried := attribution.next_trial()) is not guilty:
            assert tried is other
            attribution.remove(tried)
        deaths.append(death(guilty, status=status))
        verdict = judge(attribution, deaths[-1], [guilty])
        assert (verdict.blamed is guilty) is (number == num_deaths - 1)
    assert verdict.explained == frozenset(deaths)


def test_verdict_clears_the_suspects_of_the_same_deaths() -> None:
    attribution, guilty, other = CrashAttribution(), opened("guilty"), opened("other", 1)
    judge(attribution, death(guilty, other), [guilty, other])
    assert attribution.next_trial() is guilty
    verdict = judge(attribution, death(guilty), [guilty])
    assert verdict.blamed is guilty and verdict.continuing == [other]
    assert attribution.next_trial() is None and not attribution.num_waiting


def test_request_beside_the_trial_is_a_suspect_until_the_third_death() -> None:
    attribution, tried = CrashAttribution(), opened("tried")
    judge(attribution, death(tried), [tried])
    for number in range(3):
        beside = opened(f"beside{number}", 5)
        last = death(tried, beside)
        assert attribution.next_trial() is tried, "at once, so that it may be alone"
        verdict = judge(attribution, last, [tried, beside])
        if number < 2:
            assert verdict.blamed is None and verdict.explained == frozenset([last])
            assert attribution.num_waiting == number + 2
    assert verdict.blamed is tried and len(verdict.explained) == 4
    assert len(verdict.continuing) == 3 and not attribution.num_waiting


def test_request_is_a_suspect_after_two_lost_engines_unless_one_comes_back() -> None:
    attribution, request = CrashAttribution(), opened("request")
    lost = death(request, is_lost=True)
    assert judge(attribution, lost, [request]).continuing == [request]
    attribution.undo_loss([request])
    assert judge(attribution, lost, [request]).continuing == [request]
    assert judge(attribution, lost, [request]).continuing == []
    assert attribution.next_trial() is request
