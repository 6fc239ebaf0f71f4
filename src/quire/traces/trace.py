"""A trace of requests in memory, independent of the format of its file.

It has the arrival and the lengths of each request, and ids that show which blocks of prompts are
equal. It holds no text and no tokens. Simulation, planning and replay use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from quire.errors import ConfigurationError

#: The ways in which a request may have ended. A "refused" request never ran; its lengths are 0.
ENDS = ("length", "stop", "abort", "error", "deadline", "disconnect", "refused")

#: Maximum number of tokens of a prompt or an answer.
MAX_TOKENS = 2**31 - 1

#: The largest prefix id in a file. This leaves room in 63 bits for the ids of thousands of copies
#: of a trace, and for the keys of blocks without an id.
MAX_PREFIX_ID = 2**40


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """The options of a request that matter for the load."""

    #: Number of answers to the prompt.
    num_choices: int = 1
    #: Number of beams in a beam search; 0 for a request that samples.
    beam_width: int = 0
    #: The limit of output tokens for each answer; None if it is not known.
    max_tokens: int | None = None
    is_greedy: bool = True
    is_streamed: bool = True
    has_grammar: bool = False
    #: A small number that stands for the adapter; 0 for none.
    adapter: int = 0


PLAIN = TraceOptions()


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace; `check` raises an error if a field has an impossible value."""

    #: The arrival in seconds since the beginning of the trace.
    at_s: float
    num_prompt_tokens: int
    #: Number of tokens of the answer, or the mean over several answers.
    num_output_tokens: int
    #: The ids of the prompt's blocks of `Trace.block_tokens` tokens, in order. Two requests share
    #: an id if their prompts are equal up to the end of that block, so no id occurs twice in one
    #: request. Ids at the end may be missing. The last id may belong to a block that the prompt
    #: fills in part (Mooncake).
    prefix_ids: tuple[int, ...] = ()
    #: The ids of the blocks that the answer fills, after the prompt's blocks. A later turn, whose
    #: prompt begins with this prompt and answer, has these ids among its prefix_ids.
    output_ids: tuple[int, ...] = ()
    #: A small number that stands for the user. Requests of two tenants have no id in common.
    tenant: int = 0
    #: The index in the trace of the request whose answer this request continues; None if there is
    #: none or it is not known.
    parent: int | None = None
    #: Seconds from the parent's end to this arrival; 0 without a parent.
    think_s: float = 0.0
    #: One of ENDS.
    end: str = "length"
    #: Measured seconds from arrival to the first token; None if the trace has no times.
    first_s: float | None = None
    #: Measured seconds from arrival to the end; None if the trace has no times.
    took_s: float | None = None
    options: TraceOptions = PLAIN
    #: The first position and the number of positions of each content of the prompt, such as an
    #: image, in ascending order.
    contents: tuple[tuple[int, int], ...] = ()

    def check(self, block_tokens: int) -> None:
        """Raise ValueError with the field and the reason if a field has an impossible value."""
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
                f"it has {len(self.prefix_ids)} prefix ids, but {self.num_prompt_tokens} prompt"
                f" tokens fill only {most} blocks of {block_tokens} tokens"
            )
        ids = self.prefix_ids + self.output_ids
        if len(set(ids)) != len(ids):
            raise ValueError(
                "a prefix id occurs twice in the request; each of its blocks must have its own id"
            )
        if ids and not 0 <= min(ids) <= max(ids) <= MAX_PREFIX_ID:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise ValueError(f"prefix id {wrong} must be between 0 and {MAX_PREFIX_ID}")
        end = 0
        for first, count in self.contents:
            if first < end or count < 1 or first + count >= self.num_prompt_tokens:
                raise ValueError(
                    f"a content of {count} positions is at {first}, but must begin at {end} or"
                    f" later and end before the last of {self.num_prompt_tokens} prompt tokens"
                )
            end = first + count
        if self.end not in ENDS:
            raise ValueError(f"its end is {self.end!r}; it must be one of {', '.join(ENDS)}")


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival. A parent comes before the requests that follow it."""

    #: Number of tokens in each block with a prefix id; at least 1.
    block_tokens: int
    requests: tuple[TraceRequest, ...]
    #: The mean number of tokens, below block_tokens, that two prompts share after their last common
    #: block; 0 if it is not known.
    shared_tail_tokens: int = 0
    #: Consider prompts whose last block in common with earlier requests is the last full block of a
    #: request whose answer filled no block. This is the share of them, from 0 to 1, that continue
    #: that request.
    continued_share: float = 0.0
    #: The measured share of prompt tokens, from 0 to 1, that came from a prefix cache; None if it
    #: is not known.
    hit_rate: float | None = None

    def __post_init__(self) -> None:
        """Raises ConfigurationError if a number is out of bounds, requests are not in order of
        arrival, or a parent does not come earlier."""
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
                    f"request {number} of the trace arrived at {request.at_s} s, but the"
                    f" request before it arrived at {last_s} s; sort the requests by at_s"
                )
            if request.parent is not None and not 0 <= request.parent < number:
                raise ConfigurationError(
                    f"request {number} of the trace has the parent {request.parent}; a parent must"
                    " come earlier in the trace"
                )
            last_s = request.at_s

    @property
    def duration_s(self) -> float:
        """Seconds from the beginning of the trace to the last arrival."""
        return self.requests[-1].at_s if self.requests else 0.0

    @property
    def num_prompt_tokens(self) -> int:
        return sum(request.num_prompt_tokens for request in self.requests)

    def first(self, num_requests: int) -> Trace:
        """A trace of the first `num_requests` requests. If requests are dropped, its hit_rate is
        None."""
        if num_requests >= len(self.requests):
            return self
        return replace(self, requests=self.requests[:num_requests], hit_rate=None)

    def at_speed(self, speed: float) -> Trace:
        """The trace with its arrival times divided by `speed` > 0; think times do not change."""
        if not speed > 0:
            raise ConfigurationError(f"speed is {speed}; it must be above 0")
        return replace(
            self,
            requests=tuple(
                replace(request, at_s=request.at_s / speed) for request in self.requests
            ),
        )

    def repeated(self, num_copies: int) -> Trace:
        """The trace with each user replaced by num_copies users, who send at the same times.

        Copies share no prefix, tenant or parent. Request n becomes num_copies requests from index
        n * num_copies on. With 0 copies the trace is empty.
        """
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
        """The share of prompt tokens that an unlimited prefix cache would have, including cached
        blocks of answers, if each request ended before the next one arrived."""
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
    """Sorts requests by arrival; equal arrivals keep their order. No request may have a parent."""
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
