"""Options of speculative decoding of other engines, as quire's options.

vLLM's `speculative_config`, a mapping or JSON on the command line, and llama.cpp's `--spec-type`.
`options.engine_options` and `compat.flags` call it.
"""

import json
from collections.abc import Mapping
from typing import Any

from quire.compat.refusals import DRAFT_HEADS
from quire.errors import ConfigurationError, did_you_mean

_METHODS = {
    "ngram": "ngram",
    "[ngram]": "ngram",
    "suffix": "ngram,siblings,history",
    "draft_model": "draft_model",
    "eagle3": "eagle3",
    "mtp": "mtp",
}
"""vLLM's method -> the value of the option `speculation`."""

_OTHER_HEADS = ("eagle", "medusa", "mlp_speculator", "dflash")

_MODEL_METHODS = ("draft_model", "eagle3")
"""The methods whose `model` drafts."""

_NUMBERS = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")

_SPEC_TYPES = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
"""The values of llama.cpp's --spec-type that look for n-grams."""

_DRAFT_TYPES = {"draft-simple": "draft_model", "draft-eagle3": "eagle3", "draft-mtp": "mtp"}
"""Values of --spec-type that name a model or a head -> values of the option `speculation`.
--model-draft names the model or head, except for MTP."""


def with_speculative_config(
    options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The options, with `speculative_config` replaced by quire's own.

    defaults: quire's options by name, with their defaults. Raises ConfigurationError, also for an
    option that is given both ways.
    """
    config = options.get("speculative_config")
    if config is None:
        return options
    kept = {name: value for name, value in options.items() if name != "speculative_config"}
    for name, value in read_speculative_config(config).items():
        given = kept.get(name)
        if given not in (None, defaults[name], value):
            raise ConfigurationError(
                f"speculative_config says {name} {value!r}, but {name} is {given!r}; give it once"
            )
        kept[name] = value
    return kept


def read_speculative_config(config: Any) -> dict[str, Any]:
    """The options that vLLM's `speculative_config` stands for. Raises ConfigurationError.

    prompt_lookup_max is the longest n-gram that vLLM looks for. It bounds nothing here, where a
    longer match is only a better one; without prompt_lookup_min it is the shortest, as in vLLM.
    """
    if not isinstance(config, Mapping):
        raise _wrong(f"is {config!r:.80}, but must be a mapping, such as {{'method': 'ngram'}}")
    # First, the method. vLLM also takes a model alone, and finds out what it is.
    given = {name: value for name, value in config.items() if value is not None}
    method = given.get("method", given.get("model"))
    if method in _OTHER_HEADS:
        raise _wrong(f"asks for {method!r:.80}, but {DRAFT_HEADS}")
    if "method" not in given and isinstance(method, str) and method not in _METHODS:
        method = "draft_model"  # a model alone
    if not isinstance(method, str) or method not in _METHODS:
        names = [name for name in _METHODS if not name.startswith("[")]
        said = "names no method" if method is None else f"has the method {method!r:.80}"
        raise _wrong(f"{said}, but must have one of {', '.join(names)}")
    model = None
    if method in _MODEL_METHODS:
        model = given.pop("model", None)
        if not isinstance(model, str) or not model:
            raise _wrong(f"has the method {method!r}, but no model; name one as 'model'")
    elif given.get("model", method) in _METHODS:
        given.pop("model", None)
    # Then read the numbers, and refuse all other keys.
    for name in given:
        if name not in ("method", *_NUMBERS):
            hint = did_you_mean(str(name), _NUMBERS) or "; leave it out"
            raise _wrong(f"has {name!r:.80}, which is not supported{hint}")
    numbers = {name: _whole_number(name, given[name]) for name in _NUMBERS if name in given}
    shortest, longest = numbers.get("prompt_lookup_min"), numbers.get("prompt_lookup_max")
    if shortest is not None and longest is not None and longest < shortest:
        raise _wrong(f"has prompt_lookup_max {longest}, below prompt_lookup_min, {shortest}")
    found: dict[str, Any] = {"speculation": _METHODS[method]}
    if model is not None:
        found["speculative_model"] = model
    if "num_speculative_tokens" in numbers:
        found["num_draft_tokens"] = numbers["num_speculative_tokens"]
    if shortest is not None or longest is not None:
        found["ngram_min_match"] = longest if shortest is None else shortest
    return found


def flags_of_config(value: str) -> list[str]:
    """The flags that vLLM's --speculative-config stands for. Raises ConfigurationError."""
    try:
        config = json.loads(value)
    except ValueError as error:
        raise _wrong(f"is {value!r:.80}, which is not JSON: {error}") from error
    options = {} if config is None else read_speculative_config(config)
    return [f"--{name.replace('_', '-')}={option}" for name, option in options.items()]


def flags_of_spec_type(value: str) -> list[str]:
    """The flags that llama.cpp's --spec-type stands for. Raises ConfigurationError."""
    names = value.split(",")
    if names == ["none"]:
        return ["--speculation=off"]
    if any(name.startswith("draft-") for name in set(names) - _DRAFT_TYPES.keys()):
        raise ConfigurationError(f"--spec-type is {value!r:.80}, but {DRAFT_HEADS}")
    if not set(names) <= {*_SPEC_TYPES, *_DRAFT_TYPES}:
        raise ConfigurationError(
            f"--spec-type is {value!r:.80}, but must be none, or some of"
            f" {', '.join((*_SPEC_TYPES, *_DRAFT_TYPES))}"
        )
    ours = dict.fromkeys(_DRAFT_TYPES.get(name, "ngram") for name in names)
    return [f"--speculation={','.join(ours)}"]


def _whole_number(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong(f"has {name} {value!r:.80}, but it must be a whole number of at least 1")
    return value


def _wrong(sentence: str) -> ConfigurationError:
    return ConfigurationError(f"speculative_config {sentence}")
