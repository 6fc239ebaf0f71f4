"""Prefix accesses to replay: recorded traces, and mixes of a hot set with scans.

An access names blocks by integers, equal where the whole prefix up to and with the block is equal.
"""

import random
from dataclasses import dataclass
from pathlib import Path

from quire.traces.mooncake import read_mooncake


@dataclass(frozen=True, slots=True)
class Access:
    """One request: when it arrives, how long it holds its blocks, and its prompt's blocks.

    block_ids: from the first block of the prompt on; no id occurs twice in a request.
    """

    arrival_s: float
    hold_s: float
    block_ids: tuple[int, ...]


def read_trace(path: Path, token_s: float = 0.0) -> list[Access]:
    """A trace in Mooncake's format. token_s: how long an output token takes; a request holds its
    blocks for as many as it has. Raises ConfigurationError, naming the line."""
    return [
        Access(request.at_s, request.num_output_tokens * token_s, request.prefix_ids)
        for request in read_mooncake(path).requests
    ]


@dataclass(frozen=True, slots=True)
class Mix:
    """A hot set of popular prompts, each with a one-off rest, among scans of one-off prompts.

    zipf: popularity falls as rank ** -zipf. hot_share: part of the requests that begin with a hot
    prompt. *_blocks: (fewest, most) of a hot prompt, of the one-off rest behind it, of a one-off
    prompt. renewed_every: the number of requests after which one hot prompt is replaced by a new
    one; 0 for never. burst: this number of consecutive requests are scans, then as many draw from
    both, so that the hot set's share of requests is halved. seconds between arrivals: always 1.
    """

    seed: int = 0
    num_requests: int = 4000
    num_hot: int = 100
    zipf: float = 1.0
    hot_share: float = 0.5
    hot_blocks: tuple[int, int] = (4, 16)
    rest_blocks: tuple[int, int] = (0, 2)
    scan_blocks: tuple[int, int] = (5, 40)
    renewed_every: int = 0
    burst: int = 0


MIXES: dict[str, Mix] = {
    "steady": Mix(),
    "flat": Mix(zipf=0.6),
    "few": Mix(num_hot=10, hot_share=0.2),
    "drifting": Mix(renewed_every=20),
    "passing": Mix(renewed_every=1),
    "bursts": Mix(burst=100),
}
"""Named mixes; their hot sets have about 1,000 blocks ("few": 100)."""


def make_mix(mix: Mix) -> list[Access]:
    """The mix's requests, drawn from its seed."""
    chance = random.Random(mix.seed)
    num_ids = 0

    def fresh(num_blocks: tuple[int, int]) -> tuple[int, ...]:
        nonlocal num_ids
        first, num_ids = num_ids, num_ids + chance.randint(*num_blocks)
        return tuple(range(first, num_ids))

    hot = [fresh(mix.hot_blocks) for _ in range(mix.num_hot)]
    weights = [(rank + 1) ** -mix.zipf for rank in range(mix.num_hot)]
    accesses: list[Access] = []
    for number in range(mix.num_requests):
        if mix.renewed_every and number % mix.renewed_every == mix.renewed_every - 1:
            hot[chance.randrange(mix.num_hot)] = fresh(mix.hot_blocks)
        is_scan = mix.burst > 0 and number // mix.burst % 2 == 1
        if not is_scan and chance.random() < mix.hot_share:
            blocks = chance.choices(hot, weights)[0] + fresh(mix.rest_blocks)
        else:
            blocks = fresh(mix.scan_blocks)
        accesses.append(Access(float(number), 0.0, blocks))
    return accesses
