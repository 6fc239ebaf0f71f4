"""A trace of requests, whatever format it was read from.

It says when each request came, how many tokens it had, and which blocks of its prompt equal those
of others; it holds no text and no token. Pure: knows no engine, no server and no clock. Used by
the simulation of engines and fleets, by planning and by replay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from quire.errors import ConfigurationError

ENDS = ("length", "stop", "abort", "error", "deadline", "disconnect", "refused")
"""How a request may have ended; "refused": it never began, and how long it was is not known."""

MAX_TOKENS = 2**31 - 1
"""Of a prompt or an answer; what is longer is no request."""

MAX_PREFIX_ID = 2**40
"""Of a trace that was read; so thousands of copies of it, and numbers for what has none, fit into
63 bits."""


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What a request asked for, as far as it matters for the load.

    num_choices: answers to the prompt. beam_width: 0: it samples. max_tokens: None: not known.
    adapter: a small number, 0 for none.
    """

    num_choices: int = 1
    beam_width: int = 0
    max_tokens: int | None = None
    is_greedy: bool = True
    is_streamed: bool = True
    has_grammar: bool = False
    adapter: int = 0


PLAIN = TraceOptions()


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    at_s: its arrival, in seconds from the trace's begin.
    num_output_tokens: of one answer; of several, their mean.
    prefix_ids: one for each block of the trace's `block_tokens` prompt tokens, from the first on;
        two requests have the same id where their prompts are equal up to and with that block, so
        none occurs twice. The last may stand for a block that the prompt fills in part (Mooncake);
        ids for the rest of the prompt may be missing. Empty where the trace has none.
    output_ids: those of the blocks behind, which the answer fills: what a later turn, whose prompt
        begins with this prompt and answer, has among its prefix_ids. Empty where there are none.
    tenant: whose it is, a small number; requests of different tenants have no id in common.
    parent: the number in the trace of the request whose answer it follows; None where that isn't
        known. think_s: seconds from that answer's end to this arrival, with a parent only.
    end: one of ENDS.
    first_s, took_s: seconds from its arrival to its first token and to its end, as they were; None
        where the trace has none. options: what it asked for.
    """

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    tenant: int = 0
    parent: int | None = None
    think_s: float = 0.0
    end: str = "length"
    first_s: float | None = None
    took_s: float | None = None
    options: TraceOptions = PLAIN

    def check(self, block_tokens: int) -> None:
        """Raise ValueError, saying which field and why, unless it is as described above."""
        _check_at_least("at_s", self.at_s, 0.0)
        _check_at_least("think_s", self.think_s, 0.0)
        _check_at_least("first_s", self.first_s or 0.0, 0.0)
        _check_at_least("took_s", self.took_s or 0.0, 0.0)
        _check_at_least("num_choices", self.options.num_choices, 1)
        _check_count("max_tokens", self.options.max_tokens or 0)
        _check_count("num_prompt_tokens", self.num_prompt_tokens)
        _check_count("num_output_tokens", self.num_output_tokens)
        _check_count("tenant", self.tenant)
        most = -(-self.num_prompt_tokens // block_tokens)
        if len(self.prefix_ids) > most:
            raise ValueError(
                f"{len(self.prefix_ids)} prefix ids are more than {self.num_prompt_tokens} prompt"
                f" tokens have blocks of {block_tokens}, which is {most}"
            )
        ids = self.prefix_ids + self.output_ids
        if len(set(ids)) != len(ids):
            raise ValueError("a prefix id occurs twice; a block's id stands for all before it too")
        if ids and not 0 <= min(ids) <= max(ids) <= MAX_PREFIX_ID:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise ValueError(f"prefix id {wrong} must be between 0 and {MAX_PREFIX_ID}")
        if self.end not in ENDS:
            raise ValueError(f"its end is {self.end!r}; it must be one of {', '.join(ENDS)}")


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival.

    block_tokens: for how many tokens one of the prefix ids stands; at least 1.
    shared_tail_tokens: how many more tokens, less than block_tokens, two prompts have in common, on
        average, behind the last block that they share; 0 where that isn't known.
    continued_share: of prompts whose last known block is the last of an earlier request, whose
        answer filled none: how many go on with that request's rest and its answer, from 0 to 1.
    hit_rate: share of the prompts' tokens that a prefix cache had, as it was; None: not known.
    """

    block_tokens: int
    requests: tuple[TraceRequest, ...]
    shared_tail_tokens: int = 0
    continued_share: float = 0.0
    hit_rate: float | None = None

    def __post_init__(self) -> None:
        """Raises ConfigurationError where requests are not in order, or parents come later."""
        if self.block_tokens < 1:
            raise ConfigurationError(f"block_tokens is {self.block_tokens}; it must be at least 1")
        if not 0 <= self.shared_tail_tokens < self.block_tokens:
            raise ConfigurationError(
                f"shared_tail_tokens is {self.shared_tail_tokens}; it must be at least 0 and less"
                f" than block_tokens, {self.block_tokens}"
            )
        if not 0 <= self.continued_share <= 1:
            raise ConfigurationError(
                f"continued_share is {self.continued_share}; it must be from 0 to 1"
            )
        last_s = 0.0
        for number, request in enumerate(self.requests):
            if request.at_s < last_s:
                raise ConfigurationError(
                    f"request {number} of the trace came at {request.at_s} s, before the one that"
                    f" is listed before it ({last_s} s); sort them by at_s"
                )
            if request.parent is not None and not 0 <= request.parent < number:
                raise ConfigurationError(
                    f"request {number} of the trace follows request {request.parent}; a parent must"
                    " come earlier"
                )
            last_s = request.at_s

    @property
    def duration_s(self) -> float:
        """From the trace's begin to the last arrival."""
        return self.requests[-1].at_s if self.requests else 0.0

    @property
    def num_prompt_tokens(self) -> int:
        return sum(request.num_prompt_tokens for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.num_output_tokens for request in self.requests)

    def first(self, num_requests: int) -> Trace:
        """The first requests. What the cache had of these alone is not known."""
        if num_requests >= len(self.requests):
            return self
        return replace(self, requests=self.requests[:num_requests], hit_rate=None)

    def at_speed(self, speed: float) -> Trace:
        """Arrivals so many times as fast; users think as long as before. speed: above 0."""
        if not speed > 0:
            raise ConfigurationError(f"speed is {speed}; it must be above 0")
        return replace(
            self,
            requests=tuple(
                replace(request, at_s=request.at_s / speed) for request in self.requests
            ),
        )

    def repeated(self, num_copies: int) -> Trace:
        """So many copies at the same times, which share no prefix, no tenant and no parent: the
        load of as many times the users. Request n of the trace becomes num_copies requests from
        number n * num_copies on; 0 copies are none."""
        num_ids = 1 + max(
            (max(each.prefix_ids + each.output_ids, default=-1) for each in self.requests),
            default=-1,
        )
        num_tenants = 1 + max((each.tenant for each in self.requests), default=-1)
        copies = [
            _moved(request, copy * num_ids, copy * num_tenants, copy, num_copies)
            for request in self.requests
            for copy in range(num_copies)
        ]
        return replace(self, requests=tuple(copies))

    def best_hit_rate(self) -> float:
        """Share of the prompts' tokens that an endless cache of the trace's blocks finds, if every
        request has ended before the next one comes; blocks of answers count once they are there."""
        known: set[int] = set()
        num_found = 0
        for request in self.requests:
            blocks = 0
            for block_id in request.prefix_ids:
                if block_id not in known:
                    break
                blocks += 1
            num_found += min(blocks * self.block_tokens, request.num_prompt_tokens)
            if request.end != "refused":
                known.update(request.prefix_ids)
                known.update(request.output_ids)
        return num_found / max(1, self.num_prompt_tokens)


def in_order(requests: Iterable[TraceRequest]) -> tuple[TraceRequest, ...]:
    """Requests without parents, sorted by arrival; those of one moment stay as they were."""
    return tuple(sorted(requests, key=lambda request: request.at_s))


def _moved(
    request: TraceRequest, first_id: int, first_tenant: int, copy: int, num_copies: int
) -> TraceRequest:
    parent = None if request.parent is None else request.parent * num_copies + copy
    return replace(
        request,
        prefix_ids=tuple(each + first_id for each in request.prefix_ids),
        output_ids=tuple(each + first_id for each in request.output_ids),
        tenant=request.tenant + first_tenant,
        parent=parent,
    )


def _check_at_least(name: str, value: float, least: float) -> None:
    if not least <= value < float("inf"):
        raise ValueError(f"{name} is {value}; it must be a number of at least {least:g}")


def _check_count(name: str, value: int) -> None:
    if not 0 <= value <= MAX_TOKENS:
        raise ValueError(f"{name} is {value}; it must be between 0 and {MAX_TOKENS}")
