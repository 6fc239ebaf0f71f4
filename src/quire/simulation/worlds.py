"""Draws small simulations that mix forks, beams, shared prefixes, cache domains and faults.

Each such simulation (world) is a `SimulationConfig` drawn from (seed, index). So a command with its
options repeats a failure in one world without running the earlier worlds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from quire.core.memory.eviction import EVICTION_ORDERS
from quire.core.memory.growth import Growth
from quire.core.scheduling.policy import POLICIES
from quire.simulation.workload import SimulationConfig, read_groups

STEPS_PER_WORLD = 5000

# The kinds of KV groups of each model. The sizes of windows and states are random.
HYBRIDS = (
    "full,window",
    "full,state",
    "full,window,latent,state",
    "window,full,window",
    "full,state,state",
    "latent",
    "latent,window,state",
    "window",
    "window,state",
    "state",
    "state,state",
)


def draw_world(
    seed: int, index: int, num_steps: int = STEPS_PER_WORLD, check_every: int = 10
) -> SimulationConfig:
    """A world with all features. Overlap, policies, and whether it crashes or is interrupted depend
    on the index, so that all combinations occur."""
    is_interrupted = index % 3 == 2
    rng = random.Random(f"world {index} of {seed}")
    block_size = rng.choice((1, 2, 4, 8, 16))
    num_groups = rng.choice((1, 1, 2, 3))
    # The pool's size is between half of the longest sequence and six of the longest sequences.
    longest = -(-120 // block_size) * num_groups
    most = rng.choice((1, 2, 3, 6))
    return SimulationConfig(
        seed=rng.getrandbits(32),
        num_steps=num_steps,
        overlap=index % 2,
        policy=sorted(POLICIES)[index // 2 % len(POLICIES)],
        eviction=random.Random(f"eviction in world {index} of {seed}").choice(
            sorted(EVICTION_ORDERS)
        ),
        num_groups=num_groups,
        block_size=block_size,
        num_blocks=rng.randint(max(2, longest // 2), longest * most + 2),
        max_num_seqs=rng.choice((1, 2, 4, 8, 16)),
        max_num_batched_tokens=rng.choice((16, 17, 32, 64)),
        num_lookahead_blocks=rng.choice((0, 1, 1, 3)),
        preempts_whole=rng.random() < 0.1,
        enable_prefix_caching=rng.random() < 0.85,
        arrivals=rng.choice(("poisson", "bursts")),
        requests_per_s=rng.choice((5.0, 15.0, 40.0)),
        max_num_waiting=rng.choice((4, 16, 32)),
        output_tokens=rng.choice(((1, 30), (1, 80), (40, 80))),
        shared_prefix_rate=rng.choice((0.0, 0.4, 0.8)),
        near_rate=rng.choice((0.0, 0.3)),
        repeat_rate=rng.choice((0.0, 0.2, 0.5)),
        num_branches=(1, rng.randint(1, 4)),
        beam_rate=rng.choice((0.0, 0.1, 0.4)),
        fork_rate=rng.choice((0.0, 0.05, 0.2)),
        public_rate=rng.choice((0.0, 0.3)),
        deadline_rate=rng.choice((0.0, 0.5)),
        abort_rate=rng.choice((0.0, 0.1, 0.4)),
        max_abort_age_steps=rng.choice((10, 30, 300)),
        stop_rate=rng.choice((0.0, 0.2)),
        end_rate=rng.choice((0.0, 0.02, 0.1)),
        logprobs_rate=rng.choice((0.0, 0.3)),
        grammar_rate=random.Random(f"grammars in world {index} of {seed}").choice((0.0, 0.3, 1.0)),
        pooling_rate=random.Random(f"pooling in world {index} of {seed}").choice((0.0, 0.0, 0.4)),
        crash_rate=0.0
        if is_interrupted
        else random.Random(f"crashes in world {index} of {seed}").choice((0.0, 0.005)),
        interrupt_rate=random.Random(f"interrupts in world {index} of {seed}").choice((0.0, 0.01))
        if is_interrupted
        else 0.0,
        step_failure_rate=rng.choice((0.0, 0.0, 0.03)),
        poison_rate=rng.choice((0.0, 0.0, 0.03)),
        nan_rate=rng.choice((0.0, 0.0, 0.1)),
        vocab_size=rng.choice((1000, 1000, 50, 4, 2)),
        forecasts=rng.random() < 0.7,
        max_itl_ratio=rng.choice((0.0, 1.5, 2.8)),
        predicted_ratio=rng.choice((0.5, 1.0, 2.0)),
        slow_rate=rng.choice((0.0, 0.02)),
        tier=_draw_tier(random.Random(f"tiers in world {index} of {seed}")),
        check_every=check_every,
    )


def _draw_tier(rng: random.Random) -> tuple[tuple[str, float], ...]:
    block_s = rng.choice((0.0, 0.0, 1e-5, 1e-3, 1e-2))
    if not block_s:
        return ()
    return (
        ("block_s", block_s),
        ("latency_s", rng.choice((0.0, 1e-3, 0.05))),
        ("failure_rate", rng.choice((0.0, 0.02, 0.3))),
        ("slow_rate", rng.choice((0.0, 0.02))),
        ("loss_rate", rng.choice((0.0, 0.1))),
        ("settle_s", rng.choice((0.0, 0.0, 0.1))),
        ("hang_rate", rng.choice((0.0, 0.001))),
        ("pause_rate", rng.choice((0.0, 0.01))),
        ("clear_rate", rng.choice((0.0, 0.001))),
        ("misjudged", rng.choice((1.0, 10.0))),
    )


def draw_hybrid_world(
    seed: int, index: int, num_steps: int = STEPS_PER_WORLD, check_every: int = 10
) -> SimulationConfig:
    """The world of `draw_world` with other kinds of KV groups, and a pool large enough for them."""
    world = draw_world(seed, index, num_steps, check_every)
    return _with_groups(world, HYBRIDS, random.Random(f"hybrid world {index} of {seed}"))


def _with_groups(
    world: SimulationConfig, choices: tuple[str, ...], rng: random.Random
) -> SimulationConfig:
    size = world.block_size
    words = rng.choice(choices).split(",")
    for place, word in enumerate(words):
        if word == "window":
            words[place] = f"window:{rng.choice((1, 2, size, 2 * size + 1, 13, 40, 200))}"
        elif word == "state":
            words[place] = f"state:{rng.choice((1, 2, 3, 5))}"
    kinds = ",".join(words)
    growth = Growth(read_groups(kinds), size)
    longest = growth.most_to_hold(world.max_model_len - 1)
    # The pool must hold a state, which takes as many blocks for a short sequence as for a long one.
    fewest = max(longest // 2, growth.most_to_hold(world.max_model_len // 3))
    most = rng.choice((1, 2, 3, 6))
    return replace(
        world,
        kinds=kinds,
        num_groups=1,
        num_blocks=rng.randint(fewest, longest * most + 2),
        snapshot_tokens=rng.choice((0, 0, size, 3 * size, 64 // size * size)),
    )


def draw_draft_world(
    seed: int, index: int, num_steps: int = STEPS_PER_WORLD, check_every: int = 10
) -> SimulationConfig:
    """The world of `draw_world` with drafts, often other kinds of KV groups, and sometimes
    adapters or contents."""
    rng = random.Random(f"draft world {index} of {seed}")
    world = draw_world(seed, index, num_steps, check_every)
    if rng.random() < 0.5:
        world = _with_groups(world, HYBRIDS, rng)
    return replace(
        world,
        max_drafts=rng.choice((1, 2, 3, 7, 20)),
        draft_error_rate=rng.choice((0.0, 0.1, 0.3, 0.3, 0.6, 1.0)),
        adapter_rate=rng.choice((0.0, 0.0, 0.3)),
        has_drafter=rng.random() < 0.5,
        content_rate=rng.choice((0.0, 0.0, 0.3, 0.7)),
        num_content_slots=rng.choice((1, 2, 4)),
        has_whole_contents=rng.random() < 0.5,
    )


def draw_content_world(
    seed: int, index: int, num_steps: int = STEPS_PER_WORLD, check_every: int = 10
) -> SimulationConfig:
    """A world whose prompts have contents, and maybe adapters; every second one is hybrid."""
    draw = draw_hybrid_world if index % 4 >= 2 else draw_world
    rng = random.Random(f"contents in world {index} of {seed}")
    return replace(
        draw(seed, index, num_steps, check_every),
        content_rate=rng.choice((0.3, 0.7, 1.0)),
        num_contents=rng.choice((3, 4, 8)),
        num_content_slots=rng.choice((1, 1, 2, 4)),
        adapter_rate=rng.choice((0.0, 0.5)),
        has_whole_contents=rng.random() < 0.5,
    )


def draw_worlds(
    seed: int,
    num_steps: int,
    check_every: int = 10,
    draw: Callable[[int, int, int, int], SimulationConfig] = draw_world,
) -> Iterator[SimulationConfig]:
    """Yields worlds of STEPS_PER_WORLD steps each, which have num_steps steps in total."""
    for index in range(-(-num_steps // STEPS_PER_WORLD)):
        left = num_steps - index * STEPS_PER_WORLD
        yield draw(seed, index, min(left, STEPS_PER_WORLD), check_every)
