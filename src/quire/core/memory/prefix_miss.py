"""Why a prompt was not served whole from the prefix cache: kept per request, for the offline API
and the simulator.

Not told to clients, and counted without OTHER_DOMAIN (see `counted_as`): that another domain has
the same prompt is that domain's affair.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from quire.core.memory.prefix_cache import Eviction, PrefixCache

TOKENS_AROUND = 8


class MissReason(StrEnum):
    """What ended the part of a prompt that was found. The first that applies, in this order."""

    NONE = "none"  # all but the last token, which is always computed, was there
    NOT_ASKED = "not_asked"  # no cache, or prompt_logprobs, which need the prompt computed
    EVICTED = "evicted"  # it was there, until its block was taken for another request
    DIFFERS = "differs"  # what follows the found part in the cache are other tokens
    BELOW_BLOCK = "below_block"  # what is missing is less than a block
    OTHER_DOMAIN = "other_domain"  # only another cache domain has it
    NEVER_SEEN = "never_seen"  # nobody asked for it before, or so long ago that it is forgotten


COUNTED_REASONS = tuple(reason for reason in MissReason if reason is not MissReason.OTHER_DOMAIN)


def counted_as(reason: MissReason) -> MissReason:
    """The reason under which an engine counts a miss; one of COUNTED_REASONS.

    Counts get around: to dashboards, and to clients of a server without keys. A count of
    OTHER_DOMAIN would answer whoever reads it and sends a guess: some other domain has that prompt.
    """
    return MissReason.NEVER_SEEN if reason is MissReason.OTHER_DOMAIN else reason


@dataclass(frozen=True, slots=True)
class PrefixMiss:
    """The end of the found part of one prompt.

    num_found_tokens: computed tokens that were found; the one at this index is the first missing.
    prompt_around, cached_around: for DIFFERS, up to 8 tokens before the first differing one, it,
        and up to 8 after it: what the prompt has there, and what the cache has.
    eviction: for EVICTED, when and for which request.
    """

    reason: MissReason
    num_found_tokens: int
    prompt_around: tuple[int, ...] = ()
    cached_around: tuple[int, ...] = ()
    eviction: Eviction | None = None


def explain_miss(
    cache: PrefixCache,
    token_ids: Sequence[int],
    chain: Sequence[bytes],
    root: bytes,
    num_found_tokens: int,
) -> PrefixMiss:
    """Why no more than num_found_tokens of token_ids were found. Changes nothing.

    chain: the hashes of all full blocks of token_ids.
    """
    num_missing = len(token_ids) - 1 - num_found_tokens
    if num_missing <= 0:
        return PrefixMiss(MissReason.NONE, num_found_tokens)
    size = cache.block_size
    index = num_found_tokens // size
    if index < len(chain):
        eviction = cache.eviction_of(chain[index])
        if eviction is not None:
            return PrefixMiss(MissReason.EVICTED, num_found_tokens, eviction=eviction)
    parent = chain[index - 1] if index else root
    tail = token_ids[index * size : (index + 1) * size]
    seen = cache.neighbour(parent, tail)
    if seen is not None and seen.num_common_tokens < min(len(seen.token_ids), len(tail)):
        start = max(0, num_found_tokens - TOKENS_AROUND)
        before = tuple(token_ids[start:num_found_tokens])
        first = num_found_tokens - index * size
        return PrefixMiss(
            MissReason.DIFFERS,
            num_found_tokens,
            tuple(token_ids[start : num_found_tokens + TOKENS_AROUND + 1]),
            before + seen.token_ids[first : first + TOKENS_AROUND + 1],
        )
    if num_missing < size:
        return PrefixMiss(MissReason.BELOW_BLOCK, num_found_tokens)
    if index == 0 and cache.is_first_of_others(tail):
        return PrefixMiss(MissReason.OTHER_DOMAIN, num_found_tokens)
    return PrefixMiss(MissReason.NEVER_SEEN, num_found_tokens)
