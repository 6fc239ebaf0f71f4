"""Simulated clients, which check the outputs of their requests.

Each branch must get the same tokens, log-probabilities and finish reason as without other requests,
and nothing after its end. Used by the simulator; independent of the scheduler.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from quire.core.request import FinishReason, Request, SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.core.sequence import Sequence
from quire.simulation.fakes.fake_adapters import BROKEN
from quire.simulation.fakes.fake_grammar import constraint_of
from quire.simulation.fakes.fake_model import ExpectedOutput
from quire.simulation.fakes.fake_source import BROKEN_CONTENT
from quire.simulation.report import SimulationReport
from quire.simulation.workload import SimulationConfig

Key = tuple[str, int]


@dataclass(slots=True)
class Client:
    """The client of one branch of a request."""

    request: Request
    branch_index: int
    #: The branch's sequence; for a beam, the first sequence of its search.
    sequence: Sequence
    #: The output that the branch must get.
    expected: ExpectedOutput
    #: The time at which the request was made, in seconds of the virtual clock.
    asked_s: float
    #: The expected log-probability of all tokens of a beam; None for other branches.
    cumulative_logprob: float | None = None
    #: Number of tokens received.
    num_received: int = 0

    @property
    def can_fork(self) -> bool:
        """Whether the sequence can be forked: it neither pools nor belongs to a beam search."""
        return not self.sequence.is_beam and self.request.params.pooling is None

    @property
    def output_token_ids(self) -> list[int]:
        """The branch's generated tokens, including the tokens that a fork got from its parent.

        A beam search has no tokens before its end.
        """
        sequence = self.sequence
        return [] if sequence.is_beam else sequence.token_ids[sequence.num_prompt_tokens :]


class Clients:
    """The clients that still wait for outputs, by request and branch."""

    def __init__(self, config: SimulationConfig, report: SimulationReport) -> None:
        self.config = config
        self.report = report
        self._waiting: dict[Key, Client] = {}
        self._num_branches: dict[str, int] = {}
        self._begun: set[str] = set()  # requests with a token in a branch that is not a fork

    def add(self, request: Request, branches: list[Sequence], now_s: float) -> None:
        """Add the clients of an accepted request."""
        self._num_branches[request.request_id] = request.n
        if request.params.beam_width:
            self._add_beams(request, branches[0], now_s)
            return
        for sequence in branches:
            self._add_sequence(request, sequence, now_s)

    def add_fork(self, parent: Client, child: Sequence, now_s: float) -> None:
        """Add the client of an accepted fork."""
        self._num_branches[child.request_id] += 1
        self._add_sequence(replace(parent.request, params=child.params), child, now_s)

    def next_branch_index(self, request_id: str) -> int:
        """The index for a new branch of the request."""
        return self._num_branches[request_id]

    def choose_to_fork(self, rng: random.Random) -> Client | None:
        """A client whose sequence may be forked; None if there is none."""
        found = [client for client in self._waiting.values() if client.can_fork]
        return rng.choice(found) if found else None

    def find(self, key: Key) -> Client | None:
        """The client that waits for this branch; None if the branch has ended."""
        return self._waiting.get(key)

    def end_aborted(self, client: Client) -> None:
        """Remove a client whose branch was aborted; for a beam, all clients of its search."""
        for key, other in list(self._waiting.items()):
            if other.sequence is client.sequence:
                self._end(key, FinishReason.ABORT)

    def cut_off(self, now_s: float) -> list[tuple[Request, list[Client]]]:
        """The requests that a new engine must resume after a crash, and their waiting clients."""
        by_request: dict[int, list[Client]] = {}
        for client in self._waiting.values():
            by_request.setdefault(id(client.request), []).append(client)
        found: list[tuple[Request, list[Client]]] = []
        for clients in by_request.values():
            first = clients[0]
            is_fork = first.branch_index >= first.request.n
            again = first.request.resume(
                {client.branch_index: client.output_token_ids for client in clients},
                has_output=is_fork or first.request.request_id in self._begun,
                elapsed_s=now_s - first.asked_s,
            )
            if again.params.prompt_logprobs is None:  # received with the first output
                for client in clients:
                    client.expected = replace(client.expected, prompt_logprobs=None)
            found.append((again, clients))
        return found

    def resumed(self, request: Request, clients: list[Client]) -> Request:
        """The request under which a new engine continues one of `cut_off`.

        A new engine does not know the forks of the old one, so each fork continues as a separate
        request. Its planned abort is dropped.
        """
        client, old_id = clients[0], request.request_id
        index = client.branch_index
        if index < request.n:
            self._num_branches[old_id] = request.n
            return request
        new_id = f"{old_id}.{self.report.num_crashes}.{index}"
        client.request = replace(client.request, request_id=new_id, n=index + 1)
        self._waiting[new_id, index] = self._waiting.pop((old_id, index))
        self._num_branches[new_id] = index + 1
        self._begun.add(new_id)
        return replace(request, request_id=new_id, n=index + 1)

    def check_all_answered(self) -> None:
        """Raise AssertionError if any client still waits."""
        unanswered = [client.sequence for client in self._waiting.values()]
        assert not unanswered, f"never answered: {unanswered}"

    def receive(self, outputs: list[SequenceOutput], now_s: float) -> None:
        """Receive outputs. Raises AssertionError if they differ from the expected outputs."""
        for output in outputs:
            key = output.request_id, output.branch_index
            client = self._waiting.get(key)
            assert client is not None, f"{output} came after the end"
            first = client.num_received
            last = first + len(output.token_ids)
            expected = client.expected
            assert tuple(output.token_ids) == expected.token_ids[first:last], (
                f"{client.sequence} got {output.token_ids} at {first}, not"
                f" {expected.token_ids[first:last]}"
            )
            if not first and last:
                self._record_wait(now_s - client.asked_s)
            client.num_received = last
            if last and output.branch_index < client.request.n:
                self._begun.add(output.request_id)
            _check_extras(output, client, first, last)
            if output.finish_reason is not None:
                self._check_end(client, output)
                if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                    self.report.latencies_s.append(now_s - client.asked_s)
                self._end(key, output.finish_reason)

    def _add_sequence(self, request: Request, sequence: Sequence, now_s: float) -> None:
        forked_token_ids = sequence.token_ids[sequence.num_prompt_tokens :]
        expected = self.config.model.expected_output(
            request,
            sequence.branch_index,
            self.config.max_model_len,
            forked_token_ids=forked_token_ids,
            constraint=constraint_of(request, self.config.vocab_size, forked_token_ids),
        )
        self._add(Client(request, sequence.branch_index, sequence, expected, now_s))

    def _add_beams(self, request: Request, leader: Sequence, now_s: float) -> None:
        found = self.config.model.expected_beams(request, self.config.max_model_len)
        for index in range(request.params.beam_width):
            expected, logprob = ExpectedOutput((), FinishReason.ERROR, None, None), None
            if index < len(found):  # a small vocabulary has fewer continuations
                hypothesis = found[index]
                expected = ExpectedOutput(
                    hypothesis.token_ids, hypothesis.finish_reason, None, None
                )
                logprob = hypothesis.cumulative_logprob
            self._add(Client(request, index, leader, expected, now_s, logprob))

    def _add(self, client: Client) -> None:
        self._waiting[client.request.request_id, client.branch_index] = client
        self.report.num_sequences += 1

    def _record_wait(self, waited_s: float) -> None:
        report = self.report
        report.num_answered += 1
        report.first_token_s += waited_s
        report.max_first_token_s = max(report.max_first_token_s, waited_s)
        report.first_token_waits_s.append(waited_s)

    def _check_end(self, client: Client, output: SequenceOutput) -> None:
        config, params = self.config, client.request.params
        last_token_id = client.request.prompt_token_ids[-1]
        is_faulty = last_token_id in (config.poison_token_id, config.nan_token_id)
        adapter = client.request.adapter
        is_broken = adapter is not None and adapter.digest.startswith(BROKEN)
        # With windows alone, a cached prefix may end after a broken content, which is not read.
        digests = [span.digest for span in client.request.content_spans]
        may_lack = any(digest.startswith(BROKEN_CONTENT) for digest in digests)
        expected = client.expected
        if output.finish_reason is FinishReason.ERROR:
            may_fail = is_faulty or is_broken or may_lack or config.step_failure_rate
            assert output.error, f"{output} failed without a reason"
            assert may_fail or expected.finish_reason is FinishReason.ERROR, (
                f"{output} failed without a fault"
            )
            return
        assert not is_faulty and not is_broken, f"{output} should have failed"
        assert output.finish_reason is expected.finish_reason, output
        assert client.num_received == len(expected.token_ids), output
        assert output.stop_reason == _stop_reason(params, output), output
        assert output.pooled == expected.pooled, output
        assert output.cumulative_logprob == client.cumulative_logprob, output

    def _end(self, key: Key, reason: FinishReason) -> None:
        client = self._waiting.pop(key)
        report, tenant = self.report, client.request.tenant
        report.finished[reason.value] = report.finished.get(reason.value, 0) + 1
        report.num_output_tokens += client.num_received
        served = report.served_tokens
        served[tenant] = served.get(tenant, 0) + client.num_received


def _check_extras(output: SequenceOutput, client: Client, first: int, last: int) -> None:
    if output.error is not None:
        return
    expected = client.expected
    wanted = None if expected.logprobs is None else expected.logprobs[first:last]
    got = None if output.logprobs is None else tuple(output.logprobs)
    assert got == wanted, f"log-probabilities {got}, not {wanted}"
    wanted = expected.prompt_logprobs if first == 0 else None
    assert not isinstance(output.prompt_logprobs, bytes), "packed between processes only"
    got = None if output.prompt_logprobs is None else tuple(output.prompt_logprobs)
    assert got == wanted, f"log-probabilities of the prompt {got}, not {wanted}"


def _stop_reason(params: DecodingParams, output: SequenceOutput) -> int | None:
    """The stop token of the request that ended the output; None if the output ended otherwise."""
    if params.pooling is not None:
        return None
    last = output.token_ids[-1]
    is_own = last in params.stop_token_ids
    if params.beam_width:  # in a beam search the model's end tokens take precedence
        is_own = is_own and last not in params.end_token_ids
    return last if output.finish_reason is FinishReason.STOP and is_own else None
