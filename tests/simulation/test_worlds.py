"""Worlds: drawn from seed and index alone, and between them everything that there is."""

from dataclasses import fields, replace

from quire.core.kv_groups import KVKind
from quire.core.memory.growth import Growth
from quire.core.scheduling.policy import POLICIES
from quire.simulation.workload import SimulationConfig
from quire.simulation.worlds import (
    STEPS_PER_WORLD,
    draw_draft_world,
    draw_hybrid_world,
    draw_world,
    draw_worlds,
)


def test_a_world_is_a_function_of_seed_and_index() -> None:
    assert draw_world(1, 5) == draw_world(1, 5)
    assert len({draw_world(seed, index).seed for seed in (1, 2) for index in range(20)}) == 40


def test_the_steps_asked_for_are_shared_out() -> None:
    worlds = list(draw_worlds(3, 2 * STEPS_PER_WORLD + 10, check_every=7))
    assert [world.num_steps for world in worlds] == [STEPS_PER_WORLD, STEPS_PER_WORLD, 10]
    assert [world.seed for world in worlds] == [draw_world(3, index).seed for index in range(3)]
    assert {world.check_every for world in worlds} == {7}


def test_all_policies_come_with_and_without_overlap() -> None:
    worlds = [draw_world(0, index) for index in range(2 * len(POLICIES))]
    pairs = {(world.policy, world.overlap) for world in worlds}
    assert pairs == {(name, overlap) for name in POLICIES for overlap in (0, 1)}


def test_every_option_takes_more_than_one_value() -> None:
    """But for those that bound the size of a world, the mixture of its requests, and what a
    policy or a device is given beside its name."""
    fixed = {"num_requests", "num_steps", "max_model_len", "prompt_tokens", "beam_width"}
    fixed |= {"num_cache_domains", "num_priorities", "num_tenants", "check_every"}
    fixed |= {"policy_options", "step_base_s", "step_token_s"}
    fixed |= {"kinds", "snapshot_tokens"}  # of `draw_hybrid_world`
    fixed |= {"max_drafts", "draft_error_rate", "has_drafter"}  # of `draw_draft_world`
    fixed |= {"content_rate", "num_contents", "num_content_slots"}  # of `draw_content_world`
    fixed |= {"has_whole_contents"}  # of the same
    fixed |= {"adapter_rate", "num_adapters", "max_loras"}  # of `test_adapter_worlds.py`
    worlds = [draw_world(0, index) for index in range(60)]
    for option in fields(SimulationConfig):
        values = {getattr(world, option.name) for world in worlds}
        assert (len(values) == 1) is (option.name in fixed), (option.name, values)
    assert {world.block_size for world in worlds} == {1, 2, 4, 8, 16}
    assert {world.num_groups for world in worlds} == {1, 2, 3}
    assert {world.num_branches for world in worlds} == {(1, most) for most in range(1, 5)}


def test_a_hybrid_world_differs_in_its_memory_alone() -> None:
    plain, hybrid = draw_world(1, 5), draw_hybrid_world(1, 5)
    assert hybrid.kinds and not plain.kinds
    names = ("kinds", "num_groups", "num_blocks", "snapshot_tokens")
    own = {name: getattr(plain, name) for name in names}
    assert replace(hybrid, **own) == plain
    assert draw_hybrid_world(1, 5) == hybrid


def test_draft_worlds_have_drafts_and_all_kinds_of_memory() -> None:
    worlds = [draw_draft_world(0, index) for index in range(60)]
    assert draw_draft_world(0, 5) == worlds[5]
    assert {world.max_drafts for world in worlds} == {1, 2, 3, 7, 20}
    assert {world.draft_error_rate for world in worlds} == {0.0, 0.1, 0.3, 0.6, 1.0}
    kinds = [world.kinds for world in worlds]
    assert "" in kinds and any("window" in words for words in kinds)
    assert any("state" in words for words in kinds)


def test_hybrid_worlds_have_all_kinds_and_room_for_a_short_sequence() -> None:
    worlds = [draw_hybrid_world(0, index) for index in range(60)]
    kinds = [{group.kind for group in world.groups} for world in worlds]
    assert set(KVKind) in kinds and {KVKind.STATE} in kinds and {KVKind.WINDOW} in kinds
    for world in worlds:
        growth = Growth(world.groups, world.block_size)
        assert growth.most_to_hold(40) <= world.num_blocks
    assert any(world.snapshot_tokens for world in worlds)
    drawn = list(draw_worlds(0, STEPS_PER_WORLD + 1, draw=draw_hybrid_world))
    assert [world.kinds for world in drawn] == [world.kinds for world in worlds[:2]]
