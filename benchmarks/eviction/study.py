"""`python -m benchmarks.eviction.study`: hit rates of eviction algorithms on a trace or a mix.

    python -m benchmarks.eviction.study --trace FILE --pools 1000,2000,5000,10000,20000,50000
    python -m benchmarks.eviction.study --mix steady,drifting --pools 300,1000,2000

Prints a table: a line for each algorithm, a column for each pool, in percent of all blocks asked
for. The orders of `core.memory.eviction.EVICTION_ORDERS` run in the engine's own block pool; the
others are written anew. An order with the name of another algorithm is called `pool-NAME` here.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.eviction.algorithms import ALGORITHMS
from benchmarks.eviction.replay import CacheFactory, PoolCache, replay
from benchmarks.eviction.traces import MIXES, Access, make_mix, read_trace
from quire.core.memory.eviction import EVICTION_ORDERS, HitDensityOrder, OrderFactory
from quire.errors import ConfigurationError


class _NoGhosts(HitDensityOrder):
    """The engine's order without its memory of evicted contents: what that is worth."""

    def recall(self, digests: Sequence[bytes]) -> list[bool]:
        super().recall(digests)
        return [False] * len(digests)


def caches() -> dict[str, CacheFactory]:
    """All algorithms, in the order of the table; eviction orders as they are registered now."""
    orders: dict[str, OrderFactory] = {"no-ghosts": _NoGhosts}
    for name in reversed(list(EVICTION_ORDERS)):
        orders[f"pool-{name}" if name in ALGORITHMS else name] = EVICTION_ORDERS.get(name)
    return ALGORITHMS | {name: _in_the_pool(order) for name, order in orders.items()}


def _in_the_pool(order: OrderFactory) -> CacheFactory:
    return lambda num_blocks, _: PoolCache(num_blocks, order)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    try:
        options = _parse(arguments)
        for name, accesses in _workloads(options):
            print(f"{name}: {len(accesses)} requests")
            print("\n".join(table(accesses, options.pools, options.algorithms)), flush=True)
    except (ConfigurationError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def table(accesses: list[Access], pools: Sequence[int], algorithms: Sequence[str]) -> list[str]:
    """The lines of the table: hit rates in percent."""
    known = caches()
    width = max(14, *(len(name) + 1 for name in algorithms))
    lines = ["blocks".ljust(width) + "".join(f"{size:9d}" for size in pools)]
    for name in algorithms:
        rates = (replay(accesses, known[name](size, accesses), size) for size in pools)
        lines.append(name.ljust(width) + "".join(f"{rate.percent:9.2f}" for rate in rates))
    return lines


def _workloads(options: argparse.Namespace) -> list[tuple[str, list[Access]]]:
    workloads: list[tuple[str, list[Access]]] = []
    if options.trace is not None:
        accesses = read_trace(options.trace, options.token_s)
        workloads.append((options.trace.name, accesses[options.requests]))
    for name in options.mix:
        mix = dataclasses.replace(MIXES[name], seed=options.seed)
        workloads.append((f"mix {name}, seed {mix.seed}", make_mix(mix)[options.requests]))
    return workloads


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.eviction.study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trace", type=Path, help="a file in Mooncake's format")
    parser.add_argument(
        "--token-s",
        type=float,
        default=0.0,
        help="seconds that an output token takes, in which the request holds its blocks; default 0:"
        " each request ends before the next begins",
    )
    parser.add_argument(
        "--mix", type=names_of(MIXES), default=[], help=f"synthetic mixes, of {', '.join(MIXES)}"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the mixes; default 0")
    parser.add_argument(
        "--requests", type=slice_of, default=slice(None), help="FIRST:LAST, of all; default all"
    )
    parser.add_argument(
        "--pools",
        type=_sizes,
        default=[1000, 2000, 5000, 10_000, 20_000, 50_000],
        help="blocks in the pool; default 1000,2000,5000,10000,20000,50000",
    )
    parser.add_argument(
        "--algorithms",
        type=names_of(caches()),
        default=list(caches()),
        help=f"of {', '.join(caches())}; default all",
    )
    options = parser.parse_args(arguments)
    if options.trace is None and not options.mix:
        parser.error("there is nothing to replay: give --trace, or --mix, or both")
    if options.token_s < 0:
        parser.error(f"--token-s is {options.token_s}, but must be at least 0")
    return options


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} must be one of {', '.join(known)}")
        return names

    return read


def _sizes(text: str) -> list[int]:
    sizes = [int(word) if word.isdecimal() else 0 for word in text.split(",")]
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers of blocks, at least 1")
    return sizes


def slice_of(text: str) -> slice:
    first, colon, last = text.partition(":")
    if not colon or not (first + last + "0").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be FIRST:LAST, of which either may lack")
    return slice(int(first or 0), int(last) if last else None)


if __name__ == "__main__":
    sys.exit(main())
