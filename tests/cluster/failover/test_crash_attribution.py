"""Which request is to blame for the deaths of engines."""

import signal

import pytest

from quire.cluster.failover.crash_attribution import CrashAttribution
from quire.core.request import Request, SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.engine_client.process.activity import Activity, Doing
from quire.engine_client.recovery import NUM_PROOF_TOKENS, Death, OpenRequest

CRASH = -int(signal.SIGSEGV)
KILLED = -int(signal.SIGKILL)


def opened(name: str, num_tokens: int = 0, beam_width: int = 0) -> OpenRequest:
    """A request with this many tokens so far."""
    params = DecodingParams(max_tokens=100, beam_width=beam_width)
    request = OpenRequest(Request(name, [1], params), 0.0)
    if num_tokens:
        request.record_output(SequenceOutput(name, 0, (7,) * num_tokens))
    return request


def death(*requests: OpenRequest, status: int = CRASH, is_lost: bool = False) -> Death:
    """A death in a step of these requests. A kill counts as lack of memory."""
    ids = frozenset(request.request_id for request in requests)
    return Death(Activity(Doing.COMPUTING, ids), status, is_lost=is_lost)


def test_only_requests_of_the_last_step_are_suspects() -> None:
    attribution, in_step, beside = CrashAttribution(), opened("in_step"), opened("beside")
    verdict = attribution.on_death(death(in_step), [in_step, beside])
    assert verdict.blamed is None and verdict.continuing == [beside]
    assert attribution.num_waiting == 1 and attribution.next_trial() is in_step
    assert attribution.next_trial() is None, "one request is on trial at a time"


def test_suspects_with_the_least_output_are_tried_first_and_beam_searches_last() -> None:
    attribution = CrashAttribution()
    long, beam, short = opened("long", 9), opened("beam", 0, beam_width=2), opened("short", 1)
    attribution.on_death(death(long, beam, short), [long, beam, short])
    order = []
    while (request := attribution.next_trial()) is not None:
        order.append(request)
        attribution.remove(request)
    assert order == [short, long, beam]


def test_suspect_is_cleared_when_it_has_repeated_its_tokens_and_two_more() -> None:
    attribution, suspect = CrashAttribution(), opened("suspect", 3)
    attribution.on_death(death(suspect), [suspect])
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
    attribution.on_death(deaths[0], [guilty, other])
    for number in range(num_deaths):
        while (tried := attribution.next_trial()) is not guilty:
            assert tried is other
            attribution.remove(tried)
        deaths.append(death(guilty, status=status))
        verdict = attribution.on_death(deaths[-1], [guilty])
        assert (verdict.blamed is guilty) is (number == num_deaths - 1)
    assert verdict.explained == frozenset(deaths)


def test_verdict_clears_the_suspects_of_the_same_deaths() -> None:
    attribution, guilty, other = CrashAttribution(), opened("guilty"), opened("other", 1)
    attribution.on_death(death(guilty, other), [guilty, other])
    assert attribution.next_trial() is guilty
    verdict = attribution.on_death(death(guilty), [guilty])
    assert verdict.blamed is guilty and verdict.continuing == [other]
    assert attribution.next_trial() is None and not attribution.num_waiting


def test_request_beside_the_trial_is_a_suspect_until_the_third_death() -> None:
    attribution, tried, beside = CrashAttribution(), opened("tried"), opened("beside", 5)
    attribution.on_death(death(tried), [tried])
    for num_suspects in (2, 2):
        while (request := attribution.next_trial()) is not tried:
            assert request is beside
            attribution.remove(request)
        assert attribution.on_death(death(tried, beside), [tried, beside]).blamed is None
        assert attribution.num_waiting == num_suspects
    while attribution.next_trial() is not tried:
        attribution.remove(beside)
    assert attribution.on_death(death(tried, beside), [tried, beside]).blamed is tried


def test_request_is_a_suspect_after_two_lost_engines_unless_one_comes_back() -> None:
    attribution, request = CrashAttribution(), opened("request")
    lost = death(request, is_lost=True)
    assert attribution.on_death(lost, [request]).continuing == [request]
    attribution.undo_loss([request])
    assert attribution.on_death(lost, [request]).continuing == [request]
    assert attribution.on_death(lost, [request]).continuing == []
    assert attribution.next_trial() is request
