"""Refuses options that a model's small files contradict, before an engine starts.

The engine makes all checks again when it is built. It needs seconds to get there, since it imports
torch and runs in a process of its own; these checks take milliseconds. Each refuses only what the
engine refuses. Called by the API server and by the commands that load a model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import ConfigurationError, InsufficientMemoryError
from quire.hub.found_model import FoundModel
from quire.hub.gguf.naming import SUFFIX
from quire.hub.model_files import read_json_object
from quire.hub.weight_check import check_weight_files
from quire.observability.gpu_presence import lacks_gpu, torch_version
from quire.observability.machine_memory import total_memory_bytes
from quire.options.engine_options import EngineOptions

_POSITIONS = "max_position_embeddings"
_ORIGINAL = "original_max_position_embeddings"
_PARTS = ("text_config", "llm_config", "language_config")
"""Fields of multimodal configs that hold the language model's own config."""


def check_before_start(options: EngineOptions, model: FoundModel) -> None:
    """Raise ConfigurationError or CheckpointError if the engine would refuse the model's files or
    its length. Models that plugins may read are not checked."""
    if options.plugins:
        return
    if model.has_weights:
        check_weight_files(model.folder)
    if options.max_model_len is not None and options.hf_overrides is None:
        _check_length(options.max_model_len, model.folder)


def check_device(name: str) -> None:
    """Raise ConfigurationError if the device is a GPU and this machine clearly has none."""
    if name.startswith("cuda") and lacks_gpu():
        raise ConfigurationError(
            f"device is {name!r}, but torch {torch_version()} sees no GPU; `quire doctor` says"
            " what it sees, and device='cpu' computes without one"
        )


def check_memory(options: EngineOptions) -> None:
    """Raise InsufficientMemoryError if the KV cache of a CPU is larger than the whole memory."""
    num_bytes, total = options.kv_cache_bytes, total_memory_bytes()
    on_cpu = options.device == "cpu" or (options.device == "auto" and lacks_gpu())
    if on_cpu and num_bytes is not None and num_bytes > total:
        raise InsufficientMemoryError(
            f"kv_cache_memory is {num_bytes / 2**30:.1f} GiB, but the machine has"
            f" {total / 2**30:.1f} GiB in all; lower kv_cache_memory"
        )


def _check_length(max_model_len: int, folder: Path) -> None:
    if folder.suffix.lower() == SUFFIX:
        _check_gguf_length(max_model_len, folder)
        return
    path = folder / "config.json"
    if not path.is_file():
        return
    config = read_json_object(path)
    inner = next((config[part] for part in _PARTS if isinstance(config.get(part), dict)), config)
    positions = inner.get(_POSITIONS)
    if not isinstance(positions, int) or max_model_len <= _most_positions(positions, inner):
        return
    raise ConfigurationError(
        f"max_model_len is {max_model_len}, but the model was made for at most"
        f" {_most_positions(positions, inner)} positions ({_POSITIONS} in its config.json is"
        f" {positions}); lower max_model_len, or leave it out for {positions}"
    )


def _check_gguf_length(max_model_len: int, path: Path) -> None:
    # The import loads numpy, which a model in safetensors does not need.
    from quire.hub.gguf.header import read_gguf

    file = read_gguf(path)
    name = f"{file.metadata.get('general.architecture')}.context_length"
    length = file.metadata.get(name)
    # The engine works out how far divisors in tensors stretch the model.
    is_stretched = any(tensor.startswith("rope_f") for tensor in file.tensors) or any(
        ".rope.scaling." in field for field in file.metadata
    )
    if isinstance(length, int) and max_model_len > length and not is_stretched:
        raise ConfigurationError(
            f"max_model_len is {max_model_len}, but the model was made for at most {length}"
            f" positions ({name} in {path.name}); lower max_model_len, or leave it out for {length}"
        )


def _most_positions(positions: int, config: Mapping[str, Any]) -> int:
    """Maximum number of positions to which any rope type of the config may stretch the model."""
    most = positions
    for name in ("rope_scaling", "rope_parameters"):
        for rope in _ropes(config.get(name)):
            factor, original = rope.get("factor"), rope.get(_ORIGINAL)
            if isinstance(factor, (int, float)):
                longest = max(positions, original if isinstance(original, (int, float)) else 0)
                most = max(most, int(longest * factor))
    return most


def _ropes(given: Any) -> list[Mapping[str, Any]]:
    """The rope parameters in a field, which may have them for each kind of layer."""
    if not isinstance(given, dict):
        return []
    return [given, *(each for each in given.values() if isinstance(each, dict))]
