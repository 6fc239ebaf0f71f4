"""Fixtures: real models, which `./scripts/models` makes; without them their tests are skipped."""

from pathlib import Path

import pytest

MODELS = Path(__file__).parent.parent / ".models"
NO_REAL_WEIGHTS = "no real weights; ./scripts/models fetches them"


def real_model(name: str) -> Path:
    """The path of a model in `.models/`; skips the test where it is missing."""
    path = MODELS / name
    if not path.exists():
        pytest.skip(NO_REAL_WEIGHTS)
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct: a folder of bfloat16 weights, the numbers of the GGUF file."""
    return real_model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file: linears in Q4_1, the embedding in Q8_0."""
    return real_model("smollm2-135m-instruct-q4_1.gguf")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2: an encoder for embeddings, a folder of float32 weights."""
    return real_model("all-minilm-l6-v2")
