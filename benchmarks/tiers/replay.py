"""A recorded trace on a small pool with a disk behind it: hits by tier, and times to first tokens.

    python -m benchmarks.tiers.replay --trace FILE [--requests 12000] [--stretch 30] \\
        [--pool 0.02] [--disks none,500:0.1,500:1,3000:1]

FILE is in the format of Mooncake (Qin et al., FAST 2025; `mooncake_conversation.jsonl` in the
repository kvcache-ai/Mooncake). The engine's scheduler and memory serve a machine that is only
modelled (see `virtual`). A block of the trace stands for 512 tokens; here it is one of 16 tokens of
which each takes as long, and as many bytes, as 32, and answers are as much shorter. The trace comes
from a cluster: it is stretched in time until the machine can serve it.

--pool, and the second number of a disk: share of all different blocks of the trace. A disk's first
number: MB/s.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.tiers.virtual import Ask, Disk, Figures, Machine, VirtualServer
from quire.traces.mooncake import read_mooncake

SCALE = 32
"""Tokens of the trace for which one stands."""


def read_asks(path: Path, num_requests: int, stretch: float, block_size: int) -> list[Ask]:
    """The first requests of a trace; block number n has the tokens n * block_size + 1 and on."""
    asks = []
    for request in read_mooncake(path).first(num_requests).requests:
        tokens = [
            1 + block * block_size + at for block in request.prefix_ids for at in range(block_size)
        ]
        # The last block is often not full; what is cut off is part of no other prompt.
        length = max(1, request.num_prompt_tokens // SCALE)
        answer = max(1, request.num_output_tokens // SCALE)
        asks.append(Ask(stretch * request.at_s, tuple(tokens[:length]), answer))
    return asks


def machine() -> Machine:
    """That of `virtual`, with SCALE tokens in each."""
    one = Machine()
    return Machine(
        token_s=one.token_s * SCALE,
        pair_s=one.pair_s * SCALE,
        token_bytes=one.token_bytes * SCALE,
        max_num_batched_tokens=max(one.max_num_batched_tokens // SCALE, 48),
    )


def lengths_by_block(asks: Sequence[Ask], block_size: int) -> dict[int, int]:
    """How many tokens of each different block were ever asked for."""
    lengths: dict[int, int] = {}
    for ask in asks:
        for first in range(0, len(ask.prompt), block_size):
            block = ask.prompt[first] // block_size
            length = min(block_size, len(ask.prompt) - first)
            lengths[block] = max(length, lengths.get(block, 0))
    return lengths


def serve(asks: Sequence[Ask], num_blocks: int, disk: Disk | None) -> Figures:
    """One run; requests that are longer than the pool are left out."""
    fitting = [
        ask
        for ask in asks
        if len(ask.prompt) + ask.num_answer_tokens < num_blocks * machine().block_size
    ]
    return VirtualServer(machine(), num_blocks, disk).run(fitting)


def table(options: argparse.Namespace) -> list[str]:
    """A description of the replay, and its results as a table in Markdown."""
    size, page_bytes = machine().block_size, machine().block_size * machine().token_bytes
    asks = read_asks(options.trace, options.requests, options.stretch, size)
    lengths = lengths_by_block(asks, size)
    num_blocks = int(options.pool * len(lengths))
    most = 100 * (1 - sum(lengths.values()) / sum(len(ask.prompt) for ask in asks))
    lines = [
        f"{len(asks)} requests, {len(lengths)} different blocks of {page_bytes / 2**20:g} MiB, a"
        f" pool of {num_blocks} ({num_blocks * page_bytes / 2**30:.1f} GiB); at most {most:.1f}% of"
        " the prompts' tokens can be found",
        "",
        "| disk | keeps | found in memory | on disk | TTFT mean | p50 | p99 | busy | GB written a"
        " day |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for word in options.disks.split(","):
        disk, name, keeps = None, "none", "-"
        if word != "none":
            rate, share = map(float, word.split(":"))
            disk = Disk(rate * 1e6, num_bytes=int(share * len(lengths)) * page_bytes)
            name, keeps = f"{rate:g} MB/s", f"{share * len(lengths) * page_bytes / 2**30:.0f} GiB"
        found = serve(asks, num_blocks, disk)
        mean = sum(found.first_token_s) / len(found.first_token_s)
        lines.append(
            f"| {name} | {keeps} | {found.percent(found.memory_tokens):.1f}% |"
            f" {found.percent(found.disk_tokens):.1f}% |"
            f" {mean:.2f} s | {found.first_token(0.5):.2f} s | {found.first_token(0.99):.2f} s |"
            f" {100 * found.busy_s / found.virtual_s:.0f}% |"
            f" {found.written_bytes / 1e9 * 86400 / found.virtual_s:.0f} |"
        )
    return lines


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=12_000)
    parser.add_argument("--stretch", type=float, default=30.0)
    parser.add_argument("--pool", type=float, default=0.02)
    parser.add_argument("--disks", default="none,500:0.1,500:1,3000:1")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    print("\n".join(table(parse(None))))
