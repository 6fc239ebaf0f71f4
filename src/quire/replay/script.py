"""Decides when a replay sends each request of a trace, and with which prompt.

It has no clock: the caller passes in the times and answers. A request that continues an earlier one
(its parent) is due when its recorded think time has passed since the parent's answer ended (a
closed loop). All other requests are due at their recorded times.

The prompt of a later turn contains the answer that its parent got in this replay, both in the
blocks whose ids the trace lists and in the partial block after them. So the prefix cache has the
answer, although its tokens differ from the recorded answer.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from quire.traces.tokens import PromptTokens
from quire.traces.trace import Trace, TraceRequest

#: The reasons for which a request of the trace is not sent.
TOO_LONG, EMPTY, REFUSED = "longer than max_model_len", "without a token", "refused when recorded"

#: Used in place of a block id for a prompt without full blocks.
_NO_BLOCK = -1


@dataclass(frozen=True, slots=True)
class ModelBounds:
    """The limits that a model sets on prompts.

    Prompts use token ids from first_token_id to vocab_size - 1. A prompt and its answer together
    have at most max_model_len tokens.
    """

    vocab_size: int
    max_model_len: int
    first_token_id: int = 0


@dataclass(frozen=True, slots=True)
class Due:
    """When to send a request: `number` is its index in the trace, `at_s` is in seconds since the
    replay began."""

    at_s: float
    number: int


@dataclass(frozen=True, slots=True)
class _Continued:
    """A prompt that contains the tail of an earlier request: the tokens after the last full block
    of that request's prompt and answer."""

    #: The index of the prompt's block that begins with the tail.
    index: int
    #: The earlier request's index in the trace.
    parent: int


class ReplayScript:
    """One replay of a trace.

    Invariant: each request that is not left out is scheduled once: at the beginning, or when its
    parent has ended.
    """

    def __init__(self, trace: Trace, bounds: ModelBounds, *, is_closed: bool = True) -> None:
        """If `is_closed`, a request with a parent waits until the parent has ended."""
        self.trace = trace
        #: For each reason, the number of requests that are left out.
        self.left_out: Counter[str] = Counter()
        self._prompts = PromptTokens(trace, bounds.vocab_size, bounds.first_token_id)
        self._blocks: dict[int, list[int]] = {}  # tokens of blocks that answers filled, by id
        self._tails: dict[int, list[int]] = {}  # tokens after the last full block, by request
        self._continued = _continued(trace)
        self._parents_of_tails = {each.parent for each in self._continued.values()}
        self._first: list[Due] = []
        self._children: defaultdict[int, list[int]] = defaultdict(list)
        kept: set[int] = set()
        for number, request in enumerate(trace.requests):
            reason = _reason_against(request, bounds)
            if reason is not None:
                self.left_out[reason] += 1
                continue
            kept.add(number)
            if is_closed and request.parent in kept:
                assert request.parent is not None, "None is in no set of numbers"
                self._children[request.parent].append(number)
            else:
                self._first.append(Due(request.at_s, number))
        begin_s = self._first[0].at_s if self._first else 0.0
        self._first = [Due(due.at_s - begin_s, due.number) for due in self._first]
        self.num_requests = len(kept)
        self.num_prompt_tokens = sum(trace.requests[each].num_prompt_tokens for each in kept)

    @property
    def first(self) -> list[Due]:
        """The requests that do not wait for a parent, sorted by time; the first one is due at 0
        s."""
        return self._first

    def prompt(self, number: int) -> list[int]:
        """The token ids of a request that is due."""
        request, size = self.trace.requests[number], self.trace.block_tokens
        tokens = self._prompts.prompt(number)
        for index, block_id in enumerate(request.prefix_ids):
            known = self._blocks.get(block_id)
            if known is not None:
                tokens[index * size : (index + 1) * size] = known
        goes_on = self._continued.get(number)
        if goes_on is not None and goes_on.parent in self._tails:
            tail, begin = self._tails[goes_on.parent], goes_on.index * size
            tokens[begin : begin + len(tail)] = tail
            # If the block has an id, later turns may contain it.
            if goes_on.index < len(request.prefix_ids):
                block = tokens[begin : begin + size]
                if len(block) == size:
                    self._blocks[request.prefix_ids[goes_on.index]] = block
        return tokens[: request.num_prompt_tokens]

    def num_output_tokens(self, number: int) -> int:
        """Number of output tokens to request for each answer, at least 1."""
        return max(1, self.trace.requests[number].num_output_tokens)

    def end(
        self, number: int, now_s: float, prompt: Sequence[int], output: Sequence[int]
    ) -> list[Due]:
        """Record that a request has ended or was refused; returns its later turns, which are now
        due.

        `prompt` holds the token ids that were sent, and `output` those of the request's first
        answer.
        """
        request, size = self.trace.requests[number], self.trace.block_tokens
        chain = [*prompt[len(request.prefix_ids) * size :], *output]
        for index, block_id in enumerate(request.output_ids):
            block = chain[index * size : (index + 1) * size]
            if len(block) == size:
                self._blocks[block_id] = block
        if number in self._parents_of_tails:
            begin = len(request.output_ids) * size
            self._tails[number] = chain[begin : begin + size]
        return [
            Due(now_s + self.trace.requests[child].think_s, child)
            for child in self._children.pop(number, ())
        ]


def _reason_against(request: TraceRequest, bounds: ModelBounds) -> str | None:
    if request.end == "refused":
        return REFUSED
    if not request.num_prompt_tokens:
        return EMPTY
    if request.num_prompt_tokens + max(1, request.num_output_tokens) > bounds.max_model_len:
        return TOO_LONG
    return None


def _continued(trace: Trace) -> dict[int, _Continued]:
    """Finds the requests whose prompt contains the tail of an earlier request. Keys are indices in
    the trace.

    Let B be a prompt's last block that also occurs earlier, and let an earlier request end with B.
    If its answer filled B, the prompt continues that request. Otherwise B ends the prompt of that
    request, and the trace has only the share of such prompts that continue it. So these prompts are
    chosen at random, with this share as the probability.
    """
    chance = random.Random("continued")
    # (tenant, last block) -> (latest request that ends with this block, True if its answer filled
    # the block)
    ends: dict[tuple[int, int], tuple[int, bool]] = {}
    known: set[int] = set()
    found: dict[int, _Continued] = {}
    for number, request in enumerate(trace.requests):
        ids = request.prefix_ids
        num_known = sum(1 for _ in takewhile(known.__contains__, ids))
        last = ids[num_known - 1] if num_known else _NO_BLOCK
        parent, is_sure = ends.get((request.tenant, last), (-1, False))
        if is_sure or (parent >= 0 and chance.random() < trace.continued_share):
            found[number] = _Continued(num_known, parent)
        known.update(ids)
        known.update(request.output_ids)
        if request.end != "refused":
            chain = (_NO_BLOCK, *ids, *request.output_ids)
            ends[request.tenant, chain[-1]] = number, bool(request.output_ids)
    return found
