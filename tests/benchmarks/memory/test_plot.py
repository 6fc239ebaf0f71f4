"""The picture shows every figure; without matplotlib the refusal says how to get it."""

import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.memory import plot as memory_plot
from benchmarks.memory.results import MemoryResults
from benchmarks.memory.sharing import BEAMS, PARALLEL, Saved
from tests.benchmarks.memory.test_results import results

from quire.bench.baselines.contiguous import KV_ALLOCATORS
from quire.errors import ConfigurationError

PNG = b"\x89PNG\r\n\x1a\n"
FULL = results()
SHARING = [Saved(kind, width, 0.3, 5, 9) for kind in (PARALLEL, BEAMS) for width in (2, 4)]


def test_without_matplotlib_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigurationError, match=r"needs matplotlib, .*pip install matplotlib"):
        memory_plot.draw(FULL, tmp_path / "out.png")


@pytest.mark.parametrize(
    "shown",
    [
        MemoryResults(FULL.setting, FULL.allocators, SHARING),
        MemoryResults(FULL.setting, FULL.allocators, []),
        MemoryResults(FULL.setting, {}, SHARING[:1]),
    ],
    ids=["both", "allocators", "sharing"],
)
def test_a_picture_is_drawn(shown: MemoryResults, tmp_path: Path) -> None:
    path = tmp_path / "out.png"
    memory_plot.draw(shown, path)
    assert path.read_bytes().startswith(PNG) and path.stat().st_size > 10_000


def test_the_bars_are_the_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.append(figure))
    memory_plot.draw(MemoryResults(FULL.setting, FULL.allocators, SHARING), tmp_path / "out.png")
    shares, running, throughput, saved = drawn[0].axes
    useful = [bar.get_width() for bar in shares.containers[0]]
    assert useful == [0.75] * len(KV_ALLOCATORS)
    assert [bar.get_width() for bar in running.containers[0]] == [10.0, 11.0, 12.0, 13.0]
    assert [bar.get_width() for bar in throughput.containers[0]] == [123.4] * 4
    assert [bar.get_height() for bars in saved.containers for bar in bars] == [0.3] * 4
    labels = [text.get_text() for text in shares.texts]
    assert labels == ["75%"] * 4 + ["25%"] * 4


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="can't be written"):
        memory_plot.draw(FULL, tmp_path / "none" / "out.png")


def test_every_allocator_and_part_has_a_name_and_a_colour() -> None:
    assert set(memory_plot._NAMES) == set(KV_ALLOCATORS)
    assert set(memory_plot._PART_NAMES) == set(memory_plot._COLOURS) == set(memory_plot.PARTS)
