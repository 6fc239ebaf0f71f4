"""Code of both sides of `comparison.py`: names and sizes of cases, the clock, the dialogue.

A side is a process of its own, in the environment of its engine: it reads one request per line,
times that case and answers with one line of JSON. Standard library only, since it is imported by
both environments.
"""

import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

BLOCK_SIZE = 16
NUM_PREFIX_BLOCKS = 1_000  # of the prefix that is hashed and looked up
NUM_SEQUENCES = 256  # that decode in a step
NUM_POOL_BLOCKS = 8_192
NUM_TAKEN_BLOCKS = 512  # by one allocation of a prompt's size
NUM_LOOKUPS = 4_096
LOOKUP_CONTEXT = 8_000  # tokens of a sequence whose slots are looked up
NUM_FILLERS = 16
NUM_WARM_UP_STEPS = 32
NUM_STEPS = 96  # a multiple of BLOCK_SIZE: each sequence fills equally many blocks
VOCABULARY_SIZE = 30_000
MIN_TIMED_S = 0.25


@dataclass(frozen=True, slots=True)
class Timing:
    """One case, once: nanoseconds per unit, by the thread's CPU clock and on the wall.

    busy_cpu_s: what the process used for all of the case, set-up included.
    """

    cpu_ns: float
    wall_ns: float
    busy_cpu_s: float = 0.0


class Clock:
    """Adds up sections: `with clock:` around each."""

    def __init__(self) -> None:
        self.wall_ns = self.cpu_ns = 0

    def __enter__(self) -> None:
        self._wall, self._cpu = time.perf_counter_ns(), time.thread_time_ns()

    def __exit__(self, *_: object) -> None:
        self.cpu_ns += time.thread_time_ns() - self._cpu
        self.wall_ns += time.perf_counter_ns() - self._wall

    def timing(self, num_units: int) -> Timing:
        return Timing(self.cpu_ns / num_units, self.wall_ns / num_units)


def settle() -> None:
    """After set-up: what was built is left out of garbage collections, as in a serving engine."""
    gc.collect()
    gc.freeze()


def time_calls(
    call: Callable[[], object],
    num_units: int,
    before: Callable[[], object] = lambda: None,
    num_warm_up: int = 1,
) -> Timing:
    """Mean over calls for at least MIN_TIMED_S; each call does num_units units.

    before: readies the next call; not timed.
    """
    for _ in range(num_warm_up):
        before()
        call()
    settle()
    clock, num_calls = Clock(), 0
    while clock.wall_ns < MIN_TIMED_S * 1e9:
        before()
        with clock:
            call()
        num_calls += 1
    return clock.timing(num_calls * num_units)


class NewPrompts:
    """Prompts of NUM_TAKEN_BLOCKS blocks that fill a pool together, all new whenever drawn."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks % NUM_TAKEN_BLOCKS == 0, num_blocks
        num_prompts = num_blocks // NUM_TAKEN_BLOCKS
        self._prompts = make_prompts(num_prompts, NUM_TAKEN_BLOCKS * BLOCK_SIZE, seed=2)
        self._num_drawn = 0

    def draw(self) -> list[list[int]]:
        """Another first token makes every block of a prompt's chain another content."""
        self._num_drawn += 1
        return [[self._num_drawn, *prompt[1:]] for prompt in self._prompts]


def make_prompts(num_prompts: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Random prompts, equal on both sides."""
    draw = random.Random(seed)
    ids = range(1, VOCABULARY_SIZE)
    return [draw.choices(ids, k=num_tokens) for _ in range(num_prompts)]


def staggered(context: int) -> list[int]:
    """Prompt lengths around `context`, so that equally many sequences fill a block in each step."""
    return [context - NUM_WARM_UP_STEPS - index % BLOCK_SIZE for index in range(NUM_SEQUENCES)]


def num_pool_blocks(context: int) -> int:
    """Half as many again as the sequences come to need."""
    return NUM_SEQUENCES * (-(-(context + NUM_STEPS) // BLOCK_SIZE) + 2) * 3 // 2


def make_fillers(context: int) -> list[list[int]]:
    """Prompts for all blocks of the pool that those of the sequences leave, each below a model's
    length: computed and ended, they are cached content, so that each new block evicts one."""
    num_used = sum(-(-length // BLOCK_SIZE) for length in staggered(context))
    num_each = (num_pool_blocks(context) - num_used) // NUM_FILLERS
    return make_prompts(NUM_FILLERS, num_each * BLOCK_SIZE - 1, seed=4)


def serve(engine: str, version: str, cases: dict[str, Callable[..., Timing]]) -> None:
    """Answer on standard output until the input ends; whatever else prints, prints to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps({"engine": engine, "version": version, "cases": sorted(cases)}), file=answers)
    for line in _requests():
        name, *sizes = line.split()
        started_s = time.process_time()
        timing = cases[name](*map(int, sizes))
        gc.unfreeze()
        gc.collect()
        timing = replace(timing, busy_cpu_s=time.process_time() - started_s)
        print(json.dumps(asdict(timing)), file=answers)


def _requests() -> Iterator[str]:
    while line := sys.stdin.readline():
        yield line
