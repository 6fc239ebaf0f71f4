"""Applies the option `hf_overrides`, which replaces fields of a model's config.json.

vLLM's scripts use some of these fields for settings that are options of quire. Called by
`model_kind`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.errors import ConfigurationError, shown
from quire.options.engine_options import EngineOptions

_CLASSIFIER = "ForSequenceClassification"
_TWO_TOKENS = "from_2_way_softmax"
_OF_TWO_TOKENS = ("classifier_from_token", "method", "is_original_qwen3_reranker")


def move_overrides_to_options(options: EngineOptions) -> EngineOptions:
    """Turn overrides for which quire has an option into that option.

    Fields of config.json stay in hf_overrides. Raises ConfigurationError for contradictions and
    for overrides that can't be obeyed.
    """
    fields = dict(options.hf_overrides or {})
    if "max_model_len" in fields:
        options = _with_option(options, "max_model_len", fields.pop("max_model_len"))
    said = {name: fields.pop(name) for name in _OF_TWO_TOKENS if name in fields}
    if said:
        options = _with_option(options, "score_tokens", _score_tokens(said))
        # vLLM makes a classifier from two rows of the output head. It computes the same scores as
        # the option score_tokens.
        if str(fields.get("architectures", [""])[0]).endswith(_CLASSIFIER):
            del fields["architectures"]
    return replace(options, hf_overrides=fields or None)


def _with_option(options: EngineOptions, name: str, value: Any) -> EngineOptions:
    given = getattr(options, name)
    if given is not None and given != value:
        raise ConfigurationError(
            f"{name} is {given!r}, and {value!r} in hf_overrides; give one of them"
        )
    changes: dict[str, Any] = {name: value}
    return replace(options, **changes)


def _score_tokens(said: Mapping[str, Any]) -> str:
    words = said.get("classifier_from_token")
    reads_two = said.get("is_original_qwen3_reranker") is True or said.get("method") == _TWO_TOKENS
    is_pair = isinstance(words, list) and len(words) == 2
    if not is_pair or not reads_two or not all(isinstance(word, str) for word in words or ()):
        raise ConfigurationError(
            f"hf_overrides has {shown(dict(said))}, but a score is made of two tokens: name them by"
            " classifier_from_token, as ['no', 'yes'], with method='from_2_way_softmax', or by the"
            " option score_tokens"
        )
    return ",".join(words or ())
