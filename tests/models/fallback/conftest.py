"""Tiny random models of classes of transformers, and their configs as a folder has them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from benchmarks.fallback.tiny_models import class_of, make_tiny, tiny_fields
from transformers import CONFIG_MAPPING


@pytest.fixture(autouse=True, scope="session")
def quiet() -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """(folder, transformers' model) of a model type."""

    def make(model_type: str, **fields: Any) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(model_type)
        return folder, make_tiny(model_type, folder, **fields)

    return make


def raw_config(model_type: str, **fields: Any) -> dict[str, Any]:
    """config.json of a tiny model."""
    kind = CONFIG_MAPPING[model_type]
    raw: dict[str, Any] = kind(**tiny_fields(kind) | fields).to_dict()
    return raw | {"architectures": [class_of(model_type).__name__]}
