"""The loading benchmark measures a real process: all phases, and a peak that is one's own."""

from collections.abc import Callable
from types import ModuleType

import pytest

from quire.hub.model_folder import EMBEDDED_MODEL


@pytest.fixture
def loading(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("benchmarks.checkpoints.loading")


def test_measures_a_process_by_phase(loading: ModuleType, capsys: pytest.CaptureFixture[str]):
    options = {
        "model": str(EMBEDDED_MODEL),
        "dtype": "bfloat16",
        "kernels": "torch",
        "quantization": "int8",
        "kv_cache_memory": "8MiB",
        "max_model_len": 128,
    }
    found = loading.measure(options)
    assert found["seconds"].keys() == set(loading.PHASES)
    assert sum(found["seconds"].values()) == pytest.approx(found["total_s"], rel=0.05)
    assert found["seconds"]["imports"] > found["seconds"]["config"]
    layers, head = 4 * (3 * 640 + 2 * 256 + 2 * 128) * 256, 4096 * 256
    assert found["weight_bytes"] == pytest.approx(layers + head + 2 * head, rel=0.02)
    assert found["kv_bytes"] == 8 << 20
    assert 100 << 20 < found["peak_bytes"] < 600 << 20
    found["reading_s"] = found["seconds"]["weights"]
    loading.show([found, found])
    shown = capsys.readouterr().out
    assert all(phase in shown for phase in loading.PHASES)
    assert shown.count(": kept") == 2


def test_tells_when_the_bound_is_exceeded(
    loading: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"seconds": {"weights": 1.3}, "reading_s": 1.0, "total_s": 1.0}
    found |= {"weight_bytes": 1 << 20, "kv_bytes": 0}
    loading.show([{**found, "peak_bytes": (602 << 20) + 1}, {**found, "peak_bytes": 1}])
    shown = capsys.readouterr().out
    assert "1.30 times as long, at most 1.2: EXCEEDED" in shown
    assert "bound 601 MiB: EXCEEDED" in shown
