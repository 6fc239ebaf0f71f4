"""Reads fields of a config.json, and refuses fields that the model does not read.

An unknown field might change the model's results, so it is an error, unless no class of
transformers reads it (for example notes of a fine-tune). Called by the models' `from_hf`.
"""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from quire.errors import CheckpointError, ConfigurationError, UnsupportedModelError, shown
from quire.hub.model_files import shown_name
from quire.models.config_bounds import checked_integer, checked_number
from quire.models.transformers_names.read_fields import why_it_may_be_read

# Fields that don't change logits: bookkeeping, training, and fields that transformers ignores.
_BOOKKEEPING = {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "_num_labels",
    "architectures",
    "attention_dropout",  # applied in training only, like all dropout
    "attn_implementation",
    "auto_map",  # names code in the model's folder, which is never run
    "base_model",
    "bos_token",
    "chunk_size_feed_forward",  # splits the MLP's computation, with the same result
    "dtype",
    "eos_token",
    "finetuning_task",
    "gradient_checkpointing",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "language",
    "max_seq_len",  # another name of max_sequence_length
    "max_sequence_length",  # in Llama 1 beside max_position_embeddings, and read by no model
    "model_max_length",  # a field of the tokenizer
    "model_type",
    "name",
    "name_or_path",
    "neftune_noise_alpha",  # noise on embeddings, in training only
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token",
    "prefix",
    "problem_type",
    "return_dict",
    "router_aux_loss_coef",
    "seq_length",  # another name of max_sequence_length
    "router_jitter_noise",  # noise on the router's input, in training only
    "task_specific_params",
    "tf_legacy_loss",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "unk_token",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
}
# Generation options that older transformers read from config.json and newer ones ignore.
_GENERATION = {
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
}
HARMLESS_FIELDS = frozenset(_BOOKKEEPING | _GENERATION)
HARMLESS_SUFFIX = "_token_id"

# Field -> the only accepted value. With that value the field does not change the model.
_PLAIN_VALUES: dict[str, Any] = {
    "add_cross_attention": False,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "partial_rotary_factor": 1.0,
    "pretraining_tp": 1,
    "pruned_heads": {},
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
    "use_qk_norm": False,
    "use_sliding_window": False,
    "use_mrope": False,
}


# Fields that don't change logits, but that quire reads elsewhere. Overriding them has an effect.
_SPEAKING = {"architectures", "dtype", "id2label", "num_labels", "torch_dtype"}
ORIGIN = ("auto_map", "transformers_version")
"""Fields that name the code that wrote the config, and so the code that may read its fields."""
ROPE_FORMS = ("rope_scaling", "rope_parameters")


def overridden(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Replace fields of a config. Raises ConfigurationError for a field that has no effect."""
    for name in overrides:
        is_silent = name in HARMLESS_FIELDS or name.endswith(HARMLESS_SUFFIX)
        if is_silent and name not in _SPEAKING:
            raise ConfigurationError(
                f"hf_overrides has {name}, which changes nothing that a model computes; leave it"
                " out"
            )
    names = set(overrides)
    if names & set(ROPE_FORMS):
        names |= set(ROPE_FORMS)  # the forms of transformers 4 and 5; one of them is read
    return {**{name: raw[name] for name in raw if name not in names}, **overrides}


def with_names(
    raw: Mapping[str, Any],
    names: Mapping[str, str],
    *,
    also: tuple[str, ...] = (),
    refused: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Rename fields of a config, for a family whose configs have other field names.

    `names` maps the family's names to the usual names. `also` are usual names that the family
    accepts, too. `refused` are usual names of fields that the family lacks. Raises
    UnsupportedModelError if the config has a usual name that the family does not accept.
    """
    for name in sorted((set(names.values()) | set(refused)) - set(also)):
        if raw.get(name) is not None:
            raise UnsupportedModelError(
                f"config.json: the field {name} is {shown(raw[name])}, which this architecture does"
                " not have"
            )
    return {names.get(name, name): value for name, value in raw.items()}


class ConfigFields:
    """The fields of a config. Reading a field marks it as understood. A null field is not set."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw
        self._read: set[str] = set()
        self._left_out: list[str] = []

    def value(self, name: str) -> Any:
        """The field's unchecked value; None if it is absent or null."""
        self._read.add(name)
        return self._raw.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer within its bounds. Without a default, the field must be present."""
        value = self.optional_integer(name)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"config.json has no {name}; the model can't be built without it")
        return value

    def optional_integer(self, name: str) -> int | None:
        """An integer within its bounds, or None if the field is absent or null."""
        value = self.value(name)
        return None if value is None else checked_integer(f"config.json: {name}", name, value)

    def number(self, name: str, default: float) -> float:
        """A number within its bounds."""
        value = self.value(name)
        return default if value is None else checked_number(f"config.json: {name}", name, value)

    def optional_number(self, name: str) -> float | None:
        """A number within its bounds, or None if the field is absent or null."""
        value = self.value(name)
        return None if value is None else checked_number(f"config.json: {name}", name, value)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        value = self.value(name)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(
                f"config.json: {name} is {shown(value)}, but must be true or false"
            )
        return default if value is None else value

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        """One of several strings."""
        value = self.value(name)
        if value is None:
            return default
        if value not in choices:
            raise UnsupportedModelError(
                f"config.json: {name} is {shown(value)}, but only {', '.join(choices)} is "
                "understood"
            )
        return str(value)

    def plain(self, name: str, value: Any) -> None:
        """Check an optional field whose only supported value is `value`. Raises
        UnsupportedModelError for any other value."""
        found = self.value(name)
        if found is not None and found != value:
            raise UnsupportedModelError(
                f"config.json: {name} is {shown(found)}, but only {value!r} is understood"
            )

    def head_dim(self) -> int:
        """The size of a head. If the field `head_dim` is missing, it is hidden_size /
        num_attention_heads, as in transformers."""
        size = self.optional_integer("head_dim")
        if size is not None:
            return size
        hidden_size, num_heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        what = f"config.json: hidden_size {hidden_size} over num_attention_heads {num_heads}"
        return checked_integer(what, "head_dim", hidden_size // num_heads)

    def finish(self) -> tuple[str, ...]:
        """Refuse fields that were not read, and return the names of the ignored ones.

        A field is ignored if it is harmless or if no class of transformers reads it. Otherwise
        UnsupportedModelError is raised.
        """
        for name, value in self._raw.items():
            if name in self._read or name in HARMLESS_FIELDS or name.endswith(HARMLESS_SUFFIX):
                continue
            if name in _PLAIN_VALUES:
                if value is not None and value != _PLAIN_VALUES[name]:
                    raise UnsupportedModelError(
                        f"config.json: {name} is {shown(value)}, but only {_PLAIN_VALUES[name]!r} "
                        "is understood"
                    )
            elif value is not None:
                reason = why_it_may_be_read(name, self._raw)
                if reason is not None:
                    raise self._refusal(name, value, reason)
                self._left_out.append(name)
        return tuple(dict.fromkeys(self._left_out))

    def inner(self, raw: Mapping[str, Any]) -> "ConfigFields":
        """The fields of an object inside this config. `finish` also returns its ignored fields."""
        origin = {name: self._raw[name] for name in ORIGIN if name in self._raw}
        found = ConfigFields({**origin, **raw})
        found._left_out = self._left_out
        return found

    def leaves_out(self, outer: str, inner: str) -> bool:
        """Whether the field `inner` of the field `outer` is ignored. If so, `finish` returns it."""
        is_unread = why_it_may_be_read(inner, self._raw) is None
        if is_unread:
            self._left_out.append(f"{outer}.{inner}")
        return is_unread

    def _refusal(self, name: str, value: Any, reason: str) -> UnsupportedModelError:
        """The error for an unknown field. `reason` continues the message."""
        override = shlex.quote(json.dumps({shown_name(name): None}))
        return UnsupportedModelError(
            f"config.json: the field {shown_name(name)} is {shown(value)}, which quire does not"
            f" understand and which may change the model's results: {reason}. Understood for this"
            f" architecture: {', '.join(sorted(self._read | _PLAIN_VALUES.keys()))}; bookkeeping,"
            " options of training and of generation are ignored. If the model does not need the"
            f" field, leave it out by --hf-overrides {override}"
        )
