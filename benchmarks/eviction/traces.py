"""Prefix accesses to replay: recorded traces, and mixes of a hot set with scans.

An access names blocks by integers, equal where the whole prefix up to and with the block is equal.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Access:
    """One request: when it arrives, how long it holds its blocks, and its prompt's blocks.

    block_ids: from the first block of the prompt on; no id occurs twice in a request.
    """

    arrival_s: float
    hold_s: float
    block_ids: tuple[int, ...]


def read_trace(path: Path, token_s: float = 0.0) -> list[Access]:
    """A trace in the format of Mooncake (Qin et al., FAST 2025): a JSON object a line.

    Read are timestamp (ms), output_length (tokens) and hash_ids (one for each block of 512 prompt
    tokens, the last perhaps partly filled). token_s: how long an output token takes; a request
    holds its blocks for output_length of them. Raises ConfigurationError, naming the line.
    """
    accesses: list[Access] = []
    with path.open() as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                access = Access(
                    float(row["timestamp"]) / 1000,
                    float(row["output_length"]) * token_s,
                    tuple(map(int, row["hash_ids"])),
                )
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigurationError(
                    f"line {number} of {path} is not a request of a Mooncake trace ({error!r}); it"
                    " must be a JSON object with timestamp, output_length and hash_ids"
                ) from error
            if len(set(access.block_ids)) != len(access.block_ids):
                raise ConfigurationError(f"line {number} of {path} names a hash id twice")
            accesses.append(access)
    return accesses


@dataclass(frozen=True, slots=True)
class Mix:
    """A hot set of popular prompts, each with a one-off rest, among scans of one-off prompts.

    zipf: popularity falls as rank ** -zipf. hot_share: part of the requests that begin with a hot
    prompt. *_blocks: (fewest, most) of a hot prompt, of the one-off rest behind it, of a one-off
    prompt. renewed_every: after so many requests one hot prompt is replaced by a new one; 0 for
    never. burst: so many requests in a row are scans, then as many draw from both, so that the
    hot set's share of requests is halved. seconds between arrivals: always 1.
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
