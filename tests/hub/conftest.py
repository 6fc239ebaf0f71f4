"""A hub of our own, in place of huggingface.co."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import huggingface_hub.constants
import huggingface_hub.file_download
import pytest
from tests.hub.hub_server import FakeHub, serving

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")

CHUNK_BYTES = 10_000
"""That the client writes at once; ten million without this."""

_PATH = "{repo_id}/resolve/{revision}/{filename}"
"""Of a file, as the client has it."""


def model_files() -> dict[str, bytes]:
    """A sharded model, with much beside it that is not needed."""
    index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[1]}}
    files = {
        "config.json": json.dumps({"architectures": ["LlamaForCausalLM"]}).encode(),
        "tokenizer.json": b'{"version": "1.0"}',
        "tokenizer_config.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "chat_template.json": b'{"chat_template": "{{ messages }}"}',
        "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
        "1_Pooling/config.json": b'{"pooling_mode_mean_tokens": true}',
        "model.safetensors.index.json": json.dumps(index).encode(),
        SHARDS[0]: os.urandom(300_000),
        SHARDS[1]: os.urandom(200_000),
    }
    unused = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.gguf", "model.onnx")
    more = ("consolidated.safetensors", "original/params.json", "modeling_custom.py", "model.pth")
    return files | {name: os.urandom(5_000) for name in unused + more}


@pytest.fixture
def start_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[FakeHub], FakeHub]]:
    """start(hub): from now on the client asks this one, and its cache is empty."""
    with ExitStack() as stack:

        def start(hub: FakeHub) -> FakeHub:
            stack.enter_context(serving(hub))
            settings = {
                "ENDPOINT": hub.endpoint,
                "HUGGINGFACE_CO_URL_TEMPLATE": f"{hub.endpoint}/{_PATH}",
                "HF_HUB_CACHE": str(tmp_path / "cache"),
                "HF_TOKEN_PATH": str(tmp_path / "token"),
                "HF_HUB_OFFLINE": False,
                "DOWNLOAD_CHUNK_SIZE": CHUNK_BYTES,
            }
            for name, value in settings.items():
                monkeypatch.setattr(huggingface_hub.constants, name, value)
            monkeypatch.delenv("HF_TOKEN", raising=False)
            return hub

        yield start


@pytest.fixture
def hub(start_hub: Callable[[FakeHub], FakeHub]) -> FakeHub:
    """With `model_files`."""
    return start_hub(FakeHub(model_files()))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Where the client keeps models."""
    return tmp_path / "cache"
