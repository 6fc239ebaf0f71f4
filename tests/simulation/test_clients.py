"""What clients insist on: each test breaks one promise, and the message says which."""

import dataclasses
import random
from typing import Any

import pytest

from quire.core.request import FinishReason, Request, ResumedBranch, SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.core.sequence import Sequence
from quire.core.step import TokenLogprobs
from quire.simulation.clients import Clients
from quire.simulation.report import SimulationReport
from quire.simulation.workload import SimulationConfig

CONFIG = SimulationConfig(end_rate=0.0)
PROMPT = [5, 6, 7]


def make(params: DecodingParams, n: int = 1) -> tuple[Clients, list[Sequence]]:
    clients = Clients(CONFIG, SimulationReport(0))
    request = Request("r", PROMPT, params, n=n, tenant="t")
    num_sequences = 1 if params.beam_width else n
    branches = [
        Sequence("r", list(PROMPT), params, branch_index=index) for index in range(num_sequences)
    ]
    clients.add(request, branches, 1.0)
    return clients, branches


def whole(branch_index: int = 0, **params: int) -> SequenceOutput:
    """All that a branch gets, at once."""
    asked = DecodingParams(4, **params)  # type: ignore[arg-type]
    expected = CONFIG.model.expected_output(Request("r", PROMPT, asked), branch_index)
    return SequenceOutput(
        "r",
        branch_index,
        expected.token_ids,
        0,
        FinishReason.LENGTH,
        None,
        expected.logprobs,
        expected.prompt_logprobs,
    )


def test_a_client_that_got_everything_is_done_and_counted() -> None:
    clients, _ = make(DecodingParams(4, logprobs=1, prompt_logprobs=1), n=2)
    first, second = (whole(index, logprobs=1, prompt_logprobs=1) for index in range(2))
    assert first.logprobs is not None
    start = first._replace(
        token_ids=first.token_ids[:1], finish_reason=None, logprobs=first.logprobs[:1]
    )
    rest = first._replace(
        token_ids=first.token_ids[1:], logprobs=first.logprobs[1:], prompt_logprobs=None
    )
    clients.receive([start], 3.0)
    clients.receive([rest, second], 4.5)
    clients.check_all_answered()
    report = clients.report
    assert report.finished == {"length": 2} and report.served_tokens == {"t": 8}
    assert (report.num_answered, report.first_token_s, report.max_first_token_s) == (2, 5.5, 3.5)
    assert report.first_token_waits_s == [2.0, 3.5]
    assert report.latencies_s == [3.5, 3.5]


def test_a_fork_gets_what_follows_and_a_new_index() -> None:
    clients, (parent,) = make(DecodingParams(4))
    client = clients.choose_to_fork(random.Random(1))
    assert client is not None and client.sequence is parent
    tokens = whole().token_ids
    parent.token_ids += tokens[:2]
    child = parent.branch(clients.next_branch_index("r"), dataclasses.replace(parent.params))
    assert child.branch_index == 1
    clients.add_fork(client, child, 2.0)
    expected = CONFIG.model.expected_output(client.request, 1, forked_token_ids=tokens[:2])
    clients.receive([whole(1)._replace(token_ids=expected.token_ids)], 3.0)
    assert clients.find(("r", 1)) is None and clients.find(("r", 0)) is client
    assert clients.next_branch_index("r") == 2


def test_beams_come_whole_with_their_sums_and_are_not_forked() -> None:
    clients, _ = make(DecodingParams(4, beam_width=2), n=2)
    assert clients.choose_to_fork(random.Random(1)) is None
    found = CONFIG.model.expected_beams(Request("r", PROMPT, DecodingParams(4, beam_width=2)))
    outputs = [
        SequenceOutput(
            "r",
            index,
            output.token_ids,
            0,
            output.finish_reason,
            cumulative_logprob=output.cumulative_logprob,
        )
        for index, output in enumerate(found)
    ]
    with pytest.raises(AssertionError, match=r"cumulative_logprob=0\.5"):
        clients.receive([outputs[0]._replace(cumulative_logprob=0.5)], 2.0)
    clients, _ = make(DecodingParams(4, beam_width=2), n=2)
    clients.receive(outputs, 2.0)
    clients.check_all_answered()


def test_an_aborted_beam_takes_all_with_it() -> None:
    clients, _ = make(DecodingParams(4, beam_width=3), n=3)
    client = clients.find(("r", 1))
    assert client is not None
    clients.end_aborted(client)
    clients.check_all_answered()
    assert clients.report.finished == {"abort": 3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": (1, 2, 3, 4)}, r"got \(1, 2, 3, 4\) at 0, not"),
        ({"branch_index": 1}, "came after the end"),
        ({"finish_reason": FinishReason.STOP}, "finish_reason=<FinishReason.STOP"),
        ({"stop_reason": 5}, "stop_reason=5"),
        ({"cumulative_logprob": -1.0}, "cumulative_logprob=-1.0"),
        ({"finish_reason": FinishReason.ERROR}, "failed without a reason"),
        ({"finish_reason": FinishReason.ERROR, "error": "no"}, "failed without a fault"),
        ({"logprobs": (TokenLogprobs(1, -1.0, 1, (), ()),)}, "log-probabilities .* not None"),
        ({"prompt_logprobs": ()}, r"log-probabilities of the prompt \(\), not None"),
        ({"token_ids": ()}, "token_ids=()"),
    ],
)
def test_a_broken_promise_is_refused(changes: dict[str, Any], message: str) -> None:
    clients, _ = make(DecodingParams(4))
    with pytest.raises(AssertionError, match=message):
        clients.receive([whole()._replace(**changes)], 2.0)


def test_unanswered_sequences_are_named() -> None:
    clients, _ = make(DecodingParams(4))
    with pytest.raises(AssertionError, match=r"never answered: .*<Sequence r/0"):
        clients.check_all_answered()


def test_requests_that_were_cut_off_continue_from_their_tokens() -> None:
    clients, branches = make(DecodingParams(4, logprobs=0, prompt_logprobs=1), n=3)
    first = whole(0, logprobs=0, prompt_logprobs=1)
    clients.receive([first], 3.0)
    second = whole(1, logprobs=0, prompt_logprobs=1)
    assert second.logprobs is not None
    begun = second._replace(
        token_ids=second.token_ids[:2], finish_reason=None, logprobs=second.logprobs[:2]
    )
    clients.receive([begun], 3.0)
    branches[1].token_ids += begun.token_ids
    ((request, waiting),) = clients.cut_off(4.0)
    assert [output.branch_index for output in waiting] == [1, 2]
    assert request.resumed == (ResumedBranch(1, tuple(begun.token_ids)), ResumedBranch(2))
    assert request.params.prompt_logprobs is None
    rest = second._replace(
        token_ids=second.token_ids[2:], logprobs=second.logprobs[2:], prompt_logprobs=None
    )
    third = whole(2, logprobs=0)
    clients.receive([rest, third], 5.0)
    clients.check_all_answered()


def test_beams_are_asked_for_anew_when_they_are_cut_off() -> None:
    clients, _ = make(DecodingParams(4, beam_width=2), n=2)
    ((request, waiting),) = clients.cut_off(4.0)
    assert (request.resumed, len(waiting)) == ((), 2)
