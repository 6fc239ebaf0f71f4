"""Digests of every plan and output of simulated worlds, to compare two versions of the core.

`python tools/step_traces.py > after.txt` prints a line a seed. A refactoring that changes no
behaviour leaves all of them as they were; run it before and after, each with its own PYTHONPATH:

    PYTHONPATH=../before/src python tools/step_traces.py > before.txt
    PYTHONPATH=src python tools/step_traces.py | diff before.txt -

The worlds are those of `python -m quire.simulation --everything`: forks, beams, faults, all
policies and eviction orders. A digest covers values alone, no name of a module, class or field, so
that renaming changes nothing. An enumeration counts by its text, or by its place where it is not a
text. Empty fields at the end of a record are left out, so that one that is always empty may go.
"""

import argparse
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from quire.simulation import simulator
from quire.simulation.engine_simulator import run_world
from quire.simulation.worlds import draw_world

# Of a report: what differs from run to run, what this script replaces, and what is 0 in these
# worlds and missing in versions without drafts.
NOT_COMPARED = ("steps_per_s", "digest", "num_drafts", "num_accepted_drafts")


def main() -> None:
    """Print the digest of each seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-seeds", type=int, default=50)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--num-worlds", type=int, default=6, help="of each seed (6)")
    parser.add_argument("--num-steps", type=int, default=500, help="of each world (500)")
    parser.add_argument("--check-every", type=int, default=50, help="steps between checks (50)")
    args = parser.parse_args()
    logging.disable(logging.ERROR)  # the engine logs each injected failure
    for seed in range(args.first_seed, args.first_seed + args.num_seeds):
        digest = hashlib.blake2b(digest_size=16)
        watch(simulator.Scheduler, digest.update)
        for index in range(seed * args.num_worlds, (seed + 1) * args.num_worlds):
            world = draw_world(seed, index, args.num_steps, args.check_every)
            report = run_world(world)
            counts = [
                getattr(report, field.name)
                for field in fields(report)
                if field.name not in NOT_COMPARED
            ]
            digest.update(repr(plain(counts)).encode())
        print(f"{seed} {digest.hexdigest()}", flush=True)


def watch(scheduler: Any, take: Callable[[bytes], None]) -> None:
    """Have `take` called with what the three methods of the loop are given and return."""
    for name in ("schedule", "apply", "recover"):
        method = getattr(scheduler, name)
        setattr(scheduler, name, _watched(getattr(method, "watched", method), take))


def _watched(method: Any, take: Callable[[bytes], None]) -> Any:
    def call(self: Any, *arguments: Any) -> Any:
        found = method(self, *arguments)
        take(repr((plain(arguments), plain(found))).encode())
        return found

    call.watched = method  # type: ignore[attr-defined]
    return call


def plain(value: Any) -> Any:
    """The same as tuples, numbers and texts."""
    if isinstance(value, Enum):
        return value.value if isinstance(value, str) else list(type(value)).index(value)
    if is_dataclass(value):
        return _record([getattr(value, field.name) for field in fields(value)])
    if isinstance(value, Mapping):
        return tuple((plain(key), plain(entry)) for key, entry in value.items())
    if isinstance(value, (tuple, list)):
        return _record(value) if hasattr(value, "_fields") else tuple(map(plain, value))
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(map(plain, value)))
    assert value is None or isinstance(value, (bool, int, float, str, bytes)), type(value)
    return value


def _record(values: Any) -> tuple[Any, ...]:
    found = [plain(value) for value in values]
    while found and found[-1] in (None, ()):
        found.pop()
    return tuple(found)


if __name__ == "__main__":
    main()
