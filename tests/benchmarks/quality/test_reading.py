"""What quality drivers share: losses, divergences and top tokens of the right positions."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

LoadScript = Callable[[str], ModuleType]
VOCAB = 7
WINDOWS = [[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]]


class Table:
    """Logits by the token itself: an engine whose prediction is known. noise: added to all."""

    name, version, weight_bytes = "table", "1", 56

    def __init__(self, noise: float = 0.0) -> None:
        rows = np.random.default_rng(3).normal(size=(VOCAB, VOCAB))
        self.rows = rows + noise * np.random.default_rng(4).normal(size=rows.shape)

    def logits(self, window: Sequence[int], first: int) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = self.rows[list(window[first:])].astype(np.float32)
        return found


@pytest.fixture
def reading(load_script: LoadScript) -> ModuleType:
    return load_script("reading")


def run(reading: ModuleType, folder: Path, reader: Table, *more: str) -> dict[str, Any]:
    (folder / "windows.json").write_text(json.dumps(WINDOWS))
    places = {"--windows": "windows.json", "--exact": "exact.npy", "--out": "out.json"}
    words = [str(word) for option, name in places.items() for word in (option, folder / name)]
    args = reading.make_parser("x").parse_args(["--model", "m", "--label", "int8", *words, *more])
    reading.measure(reader, args)
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


def softmax(row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    powers: np.ndarray[Any, Any] = np.exp(row)
    return powers / powers.sum()


def test_second_halves_are_predicted_and_compared(
    reading: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "ROWS", 2)  # three rows of a window: a whole part and a short one
    exact, other = Table(), Table(noise=0.3)
    reference = run(reading, tmp_path, exact, "--write-exact")
    assert reference["divergences"] == reference["agreements"] == []
    written = np.load(tmp_path / "exact.npy")
    assert written.shape == (2, 3, VOCAB) and written.dtype == np.float32
    found = run(reading, tmp_path, other)
    assert (found["peer"], found["label"], found["weight_bytes"]) == ("table", "int8", 56)
    pairs = [(window[i - 1], window[i]) for window in WINDOWS for i in (3, 4, 5)]
    for place, (token, following) in enumerate(pairs):
        known, now = softmax(exact.rows[token]), softmax(other.rows[token])
        assert reference["losses"][place] == pytest.approx(-math.log(known[following]), abs=1e-5)
        assert found["losses"][place] == pytest.approx(-math.log(now[following]), abs=1e-5)
        divergence = float((known * np.log(known / now)).sum())
        assert found["divergences"][place] == pytest.approx(divergence, abs=1e-5)
        assert found["agreements"][place] == int(known.argmax() == now.argmax())
    assert 0 < sum(found["agreements"]) < len(pairs)


def test_an_equal_engine_has_no_divergence(reading: ModuleType, tmp_path: Path) -> None:
    reference = run(reading, tmp_path, Table(), "--write-exact")
    found = run(reading, tmp_path, Table())
    assert found["losses"] == reference["losses"]
    assert max(map(abs, found["divergences"])) < 1e-6 and set(found["agreements"]) == {1}


def test_windows_of_another_length_are_refused(reading: ModuleType, tmp_path: Path) -> None:
    run(reading, tmp_path, Table(), "--write-exact")
    np.save(tmp_path / "exact.npy", np.zeros((2, 2, VOCAB), np.float32))
    with pytest.raises(ValueError, match="gives"):
        run(reading, tmp_path, Table())
