"""A fake model, in which each token is a pure function of the earlier tokens.

Each prefix has a fingerprint, which is a rolling hash of all its tokens. The next token is a
function of (fingerprint, seed, branch). So the expected output of a request can be computed without
a scheduler, a batch or a KV cache. Used by `fake_runner` and the simulator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import SupportsInt
from zlib import crc32

import numpy as np
import numpy.typing as npt

from quire.core.adapters import BASE_MODEL
from quire.core.content_spans import ContentSpan
from quire.core.request import FinishReason, Request
from quire.core.scheduling.beams.search import BeamSearch, Candidate, Hypothesis
from quire.core.step import TokenLogprobs
from quire.engine.token_masks import GrammarConstraint

Fingerprints = npt.NDArray[np.uint64]

MASK = (1 << 64) - 1
BASE = 0x9E3779B97F4A7C15 | 1  # an odd number, which has an inverse modulo 2**64
BASE_INVERSE = pow(BASE, -1, 1 << 64)
BEAM_SALT = 0xA0761D6478BD642F
END_RATE_BITS = 20
FIRST_SHIFT, FIRST_FACTOR = 30, 0xBF58476D1CE4E5B9
SECOND_SHIFT, SECOND_FACTOR = 27, 0x94D049BB133111EB
LAST_SHIFT = 31


def mix(value: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): 64 bits in, 64 well-mixed bits out."""
    # Without a loop: half of a simulation's calls end here.
    value = ((value ^ (value >> FIRST_SHIFT)) * FIRST_FACTOR) & MASK
    value = ((value ^ (value >> SECOND_SHIFT)) * SECOND_FACTOR) & MASK
    return value ^ (value >> LAST_SHIFT)


#: `mix` for values that recur, such as token ids.
mix_recurring = lru_cache(maxsize=4096)(mix)


def mix_array(values: Fingerprints) -> Fingerprints:
    """`mix` of each element."""
    for shift, factor in ((FIRST_SHIFT, FIRST_FACTOR), (SECOND_SHIFT, SECOND_FACTOR)):
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    return values ^ (values >> np.uint64(LAST_SHIFT))


def _powers(base: int, count: int) -> Fingerprints:
    return np.cumprod(np.array([1] + [base] * (count - 1), dtype=np.uint64), dtype=np.uint64)


@lru_cache(maxsize=4096)
def branch_salt(seed: int, branch_index: int) -> int:
    """The salt of a branch, which makes its tokens differ from those of other branches or seeds."""
    return mix((seed + mix(branch_index + 1)) & MASK)


def extend(fingerprint: int, token_id: int) -> int:
    """The fingerprint of a prefix with one more token. The empty prefix has fingerprint 0."""
    return (fingerprint * BASE + mix_recurring(token_id + 1)) & MASK


def extend_all(fingerprints: Fingerprints, first: int, token_ids: Sequence[int]) -> None:
    """Set the fingerprints of a row's prefixes that end with token_ids, which begin at `first`.

    fingerprints[i] is the fingerprint of the row's tokens 0 to i.
    """
    fingerprint = int(fingerprints[first - 1])
    for position, token_id in enumerate(token_ids, first):
        fingerprint = extend(fingerprint, token_id)
        fingerprints[position] = fingerprint


def adapter_start(digest: str) -> int:
    """The fingerprint of the empty prefix under an adapter. It makes the fingerprints of all
    prefixes differ from the base model's."""
    return mix(crc32(digest.encode()) + 1) if digest else 0


def fingerprints_of(
    token_ids: Sequence[int], start: int = 0, spans: Sequence[ContentSpan] = ()
) -> Fingerprints:
    """The fingerprints of all non-empty prefixes of token_ids, shortest first.

    F[i] = start * BASE**(i + 1) + sum over j <= i of mix(t[j] + 1) * BASE**(i - j), modulo 2**64,
    as one cumulative sum. `start` is the result of `adapter_start`. At the positions of `spans`, a
    hash of the content's digest and the offset in it takes the place of mix(t[j] + 1).
    """
    count = len(token_ids)
    hashes = mix_array(np.asarray(token_ids, dtype=np.uint64) + np.uint64(1))
    for span in spans:
        offsets = np.arange(span.num_tokens, dtype=np.uint64)
        content = mix_array(offsets + np.uint64(mix(crc32(span.digest.encode()))))
        hashes[span.first_position : span.end] = content
    sums = np.cumsum(hashes * _powers(BASE_INVERSE, count), dtype=np.uint64)
    return (sums + np.uint64(start * BASE & MASK)) * _powers(BASE, count)


def fake_logprobs(fingerprint: int, token_id: int, num_top: int) -> TokenLogprobs:
    """Reproducible fake log-probabilities at the position after a prefix."""
    draws = [mix((fingerprint + index) & MASK) for index in range(num_top + 1)]
    return TokenLogprobs(
        token_id,
        -(mix(fingerprint ^ mix(token_id)) >> 32) / 2**30,
        1 + draws[num_top] % 100,
        tuple(draw >> 48 for draw in draws[:num_top]),
        tuple(-(draw & 0xFFFFFFFF) / 2**30 for draw in draws[:num_top]),
    )


@dataclass(frozen=True, slots=True)
class ExpectedOutput:
    """The output that a branch must get, whatever other requests run."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    #: One entry for each token; None if the request asks for none.
    logprobs: tuple[TokenLogprobs, ...] | None
    #: One entry for each prompt token from the second on; None if the request asks for none.
    prompt_logprobs: tuple[TokenLogprobs, ...] | None
    #: The result of pooling; None if the request generates tokens.
    pooled: bytes | None = None


def fake_pooled(fingerprint: SupportsInt) -> bytes:
    """The result of a pooling request, computed from the fingerprint of its whole prompt."""
    return int(fingerprint).to_bytes(8, "little")


@dataclass(frozen=True, slots=True)
class FakeModel:
    """Computes the next token after any prefix."""

    vocab_size: int = 1000
    #: The probability that the next token is end_token_id; all others are equally likely.
    end_rate: float = 0.02

    @property
    def end_token_id(self) -> int:
        return 0

    def next_token(self, fingerprint: int, salt: int, mask: bytes | None = None) -> int:
        """The token after a prefix, for the branch with this salt.

        `mask` has a bit for each allowed token and allows at least one; None allows all tokens.
        """
        draw = mix(fingerprint ^ salt)
        if mask is not None:
            allowed = [token for token in range(8 * len(mask)) if mask[token // 8] >> token % 8 & 1]
            return allowed[draw % len(allowed)]
        if draw >> (64 - END_RATE_BITS) < self._end_limit():
            return self.end_token_id
        return 1 + (draw & 0xFFFFFFFF) % (self.vocab_size - 1)

    def beam_candidates(self, fingerprint: int, count: int) -> list[Candidate]:
        """The `count` best continuations of a prefix by one token, best first.

        The tokens are distinct, so there are at most vocab_size - 1. Tokens and log-probabilities
        depend only on the prefix.
        """
        count = min(count, self.vocab_size - 1)
        draw = mix(fingerprint ^ BEAM_SALT)
        token_ids: list[int] = []
        if draw >> (64 - END_RATE_BITS) < self._end_limit():
            token_ids = [self.end_token_id]
        chosen = set(token_ids)
        candidates: list[Candidate] = []
        logprob = -(draw & 0xFF) / 64
        while len(candidates) < count:
            draw = mix(draw)
            token_id = 1 + (draw & 0xFFFFFFFF) % (self.vocab_size - 1)
            if token_id in chosen:
                continue
            chosen.add(token_id)
            logprob -= (draw >> 56) / 128  # sometimes 0, for a tie
            candidates.append((token_id, logprob))
        if token_ids:
            place = draw % count
            candidates[place] = self.end_token_id, candidates[place][1]
        return candidates

    def expected_beams(
        self, request: Request, max_model_len: int | None = None
    ) -> list[Hypothesis]:
        """The expected results of a beam search, best first, computed without a scheduler."""
        params, prompt = request.params, request.prompt_token_ids
        most = len(prompt) + params.max_tokens
        search = BeamSearch(
            params.beam_width,
            params.length_penalty,
            num_prompt_tokens=len(prompt),
            max_num_tokens=most if max_model_len is None else min(most, max_model_len),
            end_token_ids=params.end_token_ids,
            stop_token_ids=params.stop_token_ids,
        )
        beams = [int(_prefixes_of(request, prompt)[-1])]
        while beams:
            count = params.num_beam_candidates
            choices = search.advance([self.beam_candidates(beam, count) for beam in beams])
            beams = [extend(beams[choice.parent], choice.token_id) for choice in choices]
        return search.hypotheses()

    def expected_output(
        self,
        request: Request,
        branch_index: int = 0,
        max_model_len: int | None = None,
        *,
        forked_token_ids: Sequence[int] = (),
        constraint: GrammarConstraint | None = None,
    ) -> ExpectedOutput:
        """The expected output of one branch of a request, computed without a scheduler.

        A fork begins with the output `forked_token_ids`; the returned tokens follow these. They
        obey `constraint`, whose state is after the forked tokens.
        """
        # A pooling request gets a result instead of tokens.
        params = request.params
        if params.pooling is not None:
            pooled = fake_pooled(_prefixes_of(request, request.prompt_token_ids)[-1])
            return ExpectedOutput((), FinishReason.STOP, None, None, pooled)
        # Otherwise, find the limits of the output and the fingerprint of prompt and forked tokens.
        prompt = [*request.prompt_token_ids, *forked_token_ids]
        num_left = params.max_tokens - len(forked_token_ids)
        if max_model_len is not None:
            num_left = min(num_left, max_model_len - len(prompt))
        ends = {*params.end_token_ids, *params.stop_token_ids}
        salt = branch_salt(params.seed, branch_index)
        known = [int(value) for value in _prefixes_of(request, prompt)]
        fingerprint = known[-1]
        # Then, generate tokens until a stop, the grammar's end or the limit.
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        reason = FinishReason.LENGTH
        while len(token_ids) < num_left:
            mask = None if constraint is None else constraint.mask()
            token_id = self.next_token(fingerprint, salt, mask)
            is_over = constraint is not None and constraint.accept_token(token_id)
            token_ids.append(token_id)
            if params.logprobs is not None:
                logprobs.append(fake_logprobs(fingerprint, token_id, params.logprobs))
            fingerprint = extend(fingerprint, token_id)
            num_tokens = len(forked_token_ids) + len(token_ids)
            if is_over or (token_id in ends and num_tokens >= params.min_tokens):
                reason = FinishReason.STOP
                break
        return ExpectedOutput(
            tuple(token_ids),
            reason,
            None if params.logprobs is None else tuple(logprobs),
            None
            if params.prompt_logprobs is None
            else tuple(
                fake_logprobs(prefix, token_id, params.prompt_logprobs)
                for prefix, token_id in zip(known, prompt[1:], strict=False)
            ),
        )

    def _end_limit(self) -> int:
        return int(self.end_rate * (1 << END_RATE_BITS))


def _prefixes_of(request: Request, token_ids: Sequence[int]) -> Fingerprints:
    """The fingerprints of all prefixes of token_ids, which begin with the request's prompt."""
    digest = BASE_MODEL if request.adapter is None else request.adapter.digest
    return fingerprints_of(token_ids, adapter_start(digest), request.content_spans)
