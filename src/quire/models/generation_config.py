"""Reads a model's end tokens and sampling defaults from `generation_config.json` or GGUF.

This module imports no torch, since the API server imports it. All other fields of the file are
ignored; a beam search, for example, runs only if a request asks for it.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.core.sampling_params import SamplingDefaults, SamplingParams
from quire.errors import CheckpointError, InvalidRequestError, shown
from quire.hub.gguf.generation import read_generation
from quire.hub.gguf.header import read_gguf
from quire.hub.model_files import read_json_object, shown_text

_MAX_TOKEN_ID = (1 << 31) - 1
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """A model's sampling defaults and end tokens."""

    #: Values of options that a caller does not set.
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    #: Tokens that end a sequence.
    end_token_ids: tuple[int, ...] = ()


def load_generation_config(folder: Path) -> GenerationConfig:
    """Read the generation config of a model folder, or of a GGUF file.

    Without a generation_config.json, the built-in defaults apply. If that file has no end tokens,
    the end tokens of config.json are used. Raises CheckpointError for unreadable files and for
    values out of bounds.
    """
    if folder.is_file():
        raw = read_generation(read_gguf(folder).metadata)
        return GenerationConfig(
            _read_defaults(folder, raw), _token_ids(folder, raw["eos_token_id"])
        )
    path = folder / "generation_config.json"
    raw = read_json_object(path) if path.exists() else {}
    end_tokens = raw.get("eos_token_id")
    if end_tokens is None:
        path_of_end_tokens = folder / "config.json"
        config = read_json_object(path_of_end_tokens)
        text = config.get("text_config")  # the language model's fields in a multimodal model
        inner = text.get("eos_token_id") if isinstance(text, dict) else None
        end_tokens = inner if config.get("eos_token_id") is None else config["eos_token_id"]
    else:
        path_of_end_tokens = path
    return GenerationConfig(_read_defaults(path, raw), _token_ids(path_of_end_tokens, end_tokens))


def _read_defaults(path: Path, raw: dict[str, Any]) -> SamplingDefaults:
    chosen = {name: raw[name] for name in _SAMPLING_FIELDS if raw.get(name) is not None}
    top_k = chosen.get("top_k", 0)
    if type(top_k) is int and top_k > _MAX_TOKEN_ID:
        raise CheckpointError(
            f"{path}: top_k is {shown(top_k)}, but must be at most {_MAX_TOKEN_ID}; 0 keeps all"
        )
    do_sample = raw.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise CheckpointError(f"{path}: do_sample is {shown(do_sample)}, but must be true or false")
    try:
        SamplingParams(**chosen)  # checks the same bounds as for a caller
    except InvalidRequestError as error:
        raise CheckpointError(f"{path}: {shown_text(error)}") from error
    if do_sample is False:
        chosen["temperature"] = 0.0
    return SamplingDefaults(**chosen)


def _token_ids(path: Path, value: Any) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id <= _MAX_TOKEN_ID:
            raise CheckpointError(
                f"{path}: eos_token_id is {shown(value)}, but must be a token id (0 to "
                f"{_MAX_TOKEN_ID}) or a list of them"
            )
    return tuple(dict.fromkeys(ids))
