"""Scenes stay within their bounds, cover them, and are the same each time."""

from itertools import islice

import pytest

from quire.planning.scenes import Scene, SceneBounds, draw_scenes

BOUNDS = SceneBounds(num_rows=32, num_chunk_tokens=1024, context=2048, num_slots=16_000)
TINY = SceneBounds(num_rows=1, num_chunk_tokens=8, context=20, num_slots=64)


def drawn(bounds: SceneBounds, number: int = 200) -> list[Scene]:
    return list(islice(draw_scenes(bounds), number))


@pytest.mark.parametrize("bounds", [BOUNDS, TINY])
def test_no_scene_is_beyond_its_bounds(bounds: SceneBounds) -> None:
    for scene in drawn(bounds):
        most = max((len(wave) for wave in scene.waves), default=0)
        assert 1 <= len(scene.contexts) <= bounds.num_rows
        assert max(scene.contexts) <= bounds.context
        assert len(scene.contexts) + most <= max(bounds.num_rows, 2)
        assert all(
            cached + own <= 2 * bounds.context for wave in scene.waves for cached, own in wave
        )
        assert 1 <= scene.most_tokens <= max(4, bounds.num_chunk_tokens)
        assert sum(scene.contexts) <= bounds.num_slots


def test_scenes_cover_what_steps_may_be() -> None:
    scenes = drawn(BOUNDS)
    sizes = [own for scene in scenes for wave in scene.waves for _, own in wave]
    assert min(sizes) <= 4 and max(sizes) >= 1000
    assert {1, 31, 32} <= {len(scene.contexts) for scene in scenes}
    assert max(max(scene.contexts) for scene in scenes) == 2048
    assert any(cached for scene in scenes for wave in scene.waves for cached, _ in wave)
    assert any(len(wave) > 1 for scene in scenes for wave in scene.waves)


def test_scenes_are_the_same_each_time() -> None:
    assert drawn(BOUNDS) == drawn(BOUNDS)
