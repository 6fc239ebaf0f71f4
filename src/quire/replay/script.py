"""What a replay asks, and when: a trace's requests, with tokens, and with turns that wait.

Pure: the clock and the answers come from whoever replays. A request with a parent comes as long
after the end of its parent's answer as it did in the trace (a closed loop), since the user reads
the answer first; all others come at their times.

A later turn's prompt contains the answer that its parent got in this replay, in the place of the
blocks that the trace says it has of it: whatever the model answered, the prefix cache finds it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.traces.tokens import PromptTokens
from quire.traces.trace import Trace, TraceRequest

TOO_LONG, EMPTY, REFUSED = "longer than max_model_len", "without a token", "refused when recorded"
"""Why a request of the trace is left out."""


@dataclass(frozen=True, slots=True)
class ModelBounds:
    """What prompts are made for: token ids from first_token_id to vocab_size - 1, and at most
    max_model_len tokens of prompt and answer."""

    vocab_size: int
    max_model_len: int
    first_token_id: int = 0


@dataclass(frozen=True, slots=True)
class Due:
    """A request of the trace, by its number, that is to be sent at at_s of the replay."""

    at_s: float
    number: int


@dataclass(slots=True)
class _Answers:
    """Of this replay. blocks: tokens of blocks that answers filled, by number. tails: behind such
    a block, by its number, less than a block of tokens that the answer had more."""

    blocks: dict[int, list[int]] = field(default_factory=dict)
    tails: dict[int, list[int]] = field(default_factory=dict)


class ReplayScript:
    """One replay of a trace. left_out: requests of the trace that it leaves out, by reason.

    Invariant: every other request becomes due once: at the beginning, or when its parent ended.
    """

    def __init__(self, trace: Trace, bounds: ModelBounds, *, is_closed: bool = True) -> None:
        """is_closed: requests with a parent wait for it."""
        self.trace = trace
        self.left_out: Counter[str] = Counter()
        self._prompts = PromptTokens(trace, bounds.vocab_size, bounds.first_token_id)
        self._answers = _Answers()
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
        self.num_requests = len(kept)
        self.num_prompt_tokens = sum(trace.requests[each].num_prompt_tokens for each in kept)

    @property
    def first(self) -> list[Due]:
        """Those that wait for nothing, in the order of their times."""
        return self._first

    def prompt(self, number: int) -> list[int]:
        """The token ids of a request that is due."""
        request, size = self.trace.requests[number], self.trace.block_tokens
        tokens = self._prompts.prompt(number)
        answers, before = self._answers, -1
        for index, block_id in enumerate(request.prefix_ids):
            begin = index * size
            known = answers.blocks.get(block_id)
            if known is None and before in answers.tails:
                block = tokens[begin : begin + size]
                known = _laid_over(block, answers.tails[before])
                if len(block) == size:  # later turns contain it, too
                    answers.blocks[block_id] = known
            if known is not None:
                tokens[begin : begin + size] = known
            before = block_id
        begin = len(request.prefix_ids) * size
        if before in answers.tails:
            tokens[begin:] = _laid_over(tokens[begin:], answers.tails[before])
        return tokens[: request.num_prompt_tokens]

    def num_output_tokens(self, number: int) -> int:
        """Of one answer: as many as it had, at least 1."""
        return max(1, self.trace.requests[number].num_output_tokens)

    def end(
        self, number: int, now_s: float, prompt: Sequence[int], output: Sequence[int]
    ) -> list[Due]:
        """A request has ended, or was refused, with this answer (its first, if it had several); the
        turns that follow it are due. prompt: as `prompt` gave it."""
        request, size = self.trace.requests[number], self.trace.block_tokens
        if request.output_ids:
            begin = len(request.prefix_ids) * size
            chain = [*prompt[begin:], *output]
            for index, block_id in enumerate(request.output_ids):
                block = chain[index * size : (index + 1) * size]
                if len(block) == size:
                    self._answers.blocks[block_id] = block
            rest = chain[len(request.output_ids) * size :]
            self._answers.tails[request.output_ids[-1]] = rest[:size]
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


def _laid_over(block: list[int], head: list[int]) -> list[int]:
    """The block with `head` in the place of its first tokens."""
    return head[: len(block)] + block[len(head) :]
