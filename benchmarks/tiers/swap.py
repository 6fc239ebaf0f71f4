"""Swap against recomputation, over two virtual hours of a mixed load twice as large as the memory.

    python -m benchmarks.tiers.swap [--hours 2] [--blocks 1500] [--disk-mb 500] [--load 2.0]

The engine's scheduler and memory serve a machine that is only modelled (see `virtual`): llama-160m
in bf16 on two cores. Half of the clients are sessions of many turns, which come back after some
seconds with their whole history; the others ask once, with long answers. The number of active
clients is such that together they would hold `--load` times the pool. Without a tier, what is
preempted or evicted is computed again; with one it comes back from a disk, if that is predicted to
be faster."""

import argparse
import random
from collections.abc import Sequence

from benchmarks.tiers.virtual import Ask, Disk, Figures, Machine, VirtualServer

TURNS = 12
THINKING_S = (2.0, 20.0)
QUESTION_TOKENS, FIRST_TOKENS, ANSWER_TOKENS = (20, 200), (200, 1200), (40, 200)
LONG_PROMPT_TOKENS, LONG_ANSWER_TOKENS = (100, 800), (400, 1200)


class MixedLoad:
    """Clients that each ask again when they were answered."""

    def __init__(self, num_clients: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._turns = [0] * num_clients
        self._next_token = 1

    def first(self) -> list[Ask]:
        """The requests of the clients in the first minute."""
        spread = self._rng.uniform
        return [self._new(client, spread(0.0, 60.0)) for client in range(len(self._turns))]

    def following(self, client: int, history: tuple[int, ...], now_s: float) -> Ask:
        """The next request of a client after its answer has ended."""
        thinking_s = self._rng.uniform(*THINKING_S)
        self._turns[client] += 1
        if client % 2 or self._turns[client] % TURNS == 0:
            return self._new(client, now_s + thinking_s)
        prompt = history + self._draw(QUESTION_TOKENS)
        return Ask(now_s + thinking_s, prompt, self._rng.randint(*ANSWER_TOKENS), client)

    def _new(self, client: int, at_s: float) -> Ask:
        if client % 2:
            prompt, answer = self._draw(LONG_PROMPT_TOKENS), LONG_ANSWER_TOKENS
        else:
            prompt, answer = self._draw(FIRST_TOKENS), ANSWER_TOKENS
        return Ask(at_s, prompt, self._rng.randint(*answer), client)

    def _draw(self, length: tuple[int, int]) -> tuple[int, ...]:
        """Tokens that no other prompt has."""
        first, count = self._next_token, self._rng.randint(*length)
        self._next_token += count
        return tuple(range(first, first + count))


def mean_tokens() -> float:
    """That a client holds, or would like to find, averaged over the two kinds and their turns."""

    def mid(bounds: tuple[int, int]) -> float:
        return sum(bounds) / 2

    session = mid(FIRST_TOKENS) + TURNS / 2 * (mid(QUESTION_TOKENS) + mid(ANSWER_TOKENS))
    return (session + mid(LONG_PROMPT_TOKENS) + mid(LONG_ANSWER_TOKENS)) / 2


def serve(options: argparse.Namespace, disk: Disk | None, seed: int) -> Figures:
    """One run."""
    machine = Machine()
    num_clients = round(options.load * options.blocks * machine.block_size / mean_tokens())
    load = MixedLoad(num_clients, seed)
    server = VirtualServer(machine, options.blocks, disk, next_ask=load.following)
    return server.run(load.first(), options.hours * 3600)


def table(options: argparse.Namespace) -> list[str]:
    """Markdown."""
    lines = [
        "| seed | tier | output tokens/s | ratio | TTFT p50 / p99 | preempted | computed again |"
        " found in memory / on disk |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for seed in range(options.seeds):
        base = 0.0
        for disk in (None, Disk(options.disk_mb * 1e6)):
            found = serve(options, disk, seed)
            base = base or found.tokens_per_s
            lines.append(
                f"| {seed} | {'none' if disk is None else f'{options.disk_mb:g} MB/s'} |"
                f" {found.tokens_per_s:.1f} | {found.tokens_per_s / base:.2f} |"
                f" {found.first_token(0.5):.2f} / {found.first_token(0.99):.2f} s |"
                f" {found.num_preemptions} | {found.num_recomputed_tokens} |"
                f" {found.percent(found.memory_tokens):.1f}% /"
                f" {found.percent(found.disk_tokens):.1f}% |"
            )
    return lines


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--blocks", type=int, default=1500)
    parser.add_argument("--disk-mb", type=float, default=500.0)
    parser.add_argument("--load", type=float, default=2.0)
    parser.add_argument("--seeds", type=int, default=1)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    print("\n".join(table(parse(None))))
