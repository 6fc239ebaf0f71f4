"""The scripts of benchmarks/ as modules, imported anew for each test."""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load_script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import by dotted name, a peer's driver by its bare one; forgotten after the test."""
    for folder in ("peers", "quality"):  # a driver finds its siblings so
        monkeypatch.syspath_prepend(str(BENCHMARKS / folder))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        path = getattr(sys.modules[name], "__file__", None)
        if path and BENCHMARKS in Path(path).parents:
            del sys.modules[name]


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder with the config of a 160M model; no weights."""
    folder = tmp_path / "llama-160m"
    folder.mkdir()
    config = {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "vocab_size": 32_000,
        "max_position_embeddings": 4096,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
