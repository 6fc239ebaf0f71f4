"""Load or compute: the rule beside always loading and always computing, by the disk's speed.

    python -m benchmarks.tiers.rule [--rates 5,10,20,30,50,100,200,500,2000] [--requests 300]

Prompts of 500 to 8,000 tokens come again after they were evicted from the pool, several at a time,
on the machine that `virtual` models: it computes K and V at 25 MB/s. Whole seconds are the sum of
the requests' times to the first token. The tier's rate is known to it; what computing takes the
engine learns from its own steps, which take up to `--noise` more or less. The first requests are
decided before anything is known.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.tiers.virtual import Ask, Disk, Machine, VirtualServer

MEAN_BETWEEN_S = 4.0


def draw_asks(num_requests: int, seed: int) -> list[Ask]:
    """Ask each of num_requests prompts once, then all of them again in another order and at other
    times."""
    rng = random.Random(seed)
    prompts, next_token = [], 1
    for _ in range(num_requests):
        length = round(500 * 16 ** rng.random())
        prompts.append(tuple(range(next_token, next_token + length)))
        next_token += length
    asks, now_s = [], 0.0
    for round_number in range(2):
        rng.shuffle(prompts)
        for prompt in prompts:
            now_s += rng.expovariate(1 / MEAN_BETWEEN_S)
            question = tuple(range(next_token, next_token + 20)) if round_number else ()
            next_token += 20
            asks.append(Ask(now_s, prompt + question, 4, round_number))
    return asks


def seconds(machine: Machine, asks: Sequence[Ask], rate_mb: float, decides: str) -> float:
    """Summed over the requests of the second round."""
    num_blocks = 2 * 8_100 // machine.block_size
    server = VirtualServer(machine, num_blocks, Disk(rate_mb * 1e6), decides=decides, seed=1)
    figures = server.run(asks)
    return sum(figures.first_token_s[len(asks) // 2 :])


def table(rates_mb: Sequence[float], num_requests: int, noise: float) -> list[str]:
    """Markdown."""
    machine = replace(Machine(), noise=noise)
    asks = draw_asks(num_requests, seed=3)
    lines = [
        "| disk | always compute | always load | the rule | beside the better one |",
        "|---|---|---|---|---|",
    ]
    for rate in rates_mb:
        computed, loaded, ruled = (
            seconds(machine, asks, rate, decides) for decides in ("compute", "load", "rule")
        )
        lines.append(
            f"| {rate:g} MB/s | {computed:.0f} s | {loaded:.0f} s | {ruled:.0f} s |"
            f" {ruled / min(computed, loaded):.2f} |"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default="5,10,20,30,50,100,200,500,2000,100000")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--noise", type=float, default=0.2)
    options = parser.parse_args(arguments)
    rates = list(map(float, options.rates.split(",")))
    print("\n".join(table(rates, options.requests, options.noise)))


if __name__ == "__main__":
    main()
