"""Reads and checks the tokenizer fields in a GGUF file's metadata.

    tokenizer.ggml.model, .pre      the kind of tokenizer, and its rules for splitting texts
    tokenizer.ggml.tokens           texts by token id
    tokenizer.ggml.token_type       for each token, one of `TokenType`
    tokenizer.ggml.scores, .merges  the order of merges
    tokenizer.ggml.*_token_id       special tokens by name
    tokenizer.ggml.add_*            whether tokens are added around a text

The names are those of llama.cpp (gguf-py/gguf/constants.py), and missing fields get the defaults in
its llama-vocab.cpp. Called by `text.gguf.backend` and `text.gguf.settings`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from quire.errors import CheckpointError, shown
from quire.hub.gguf.token_types import guess_types
from quire.observability.log import get_logger

PREFIX = "tokenizer.ggml."
logger = get_logger(__name__)

_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "eot_token": "eot_token_id",
    "eom_token": "eom_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # llama.cpp's spelling
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
"""Name of a special token in transformers -> name of the field with its id."""
_USUAL_IDS: dict[str, dict[str, int]] = {
    "llama": {"bos_token": 1, "eos_token": 2, "unk_token": 0},
    "bert": {
        "bos_token": 101,
        "unk_token": 100,
        "sep_token": 102,
        "pad_token": 0,
        "mask_token": 103,
    },
}
"""Default ids of special tokens by kind of tokenizer, for files without these fields."""


class TokenType(IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    #: A special token.
    CONTROL = 3
    #: A token that is matched as a whole in any text.
    USER_DEFINED = 4
    #: A placeholder without text.
    UNUSED = 5
    #: A byte such as `<0x0A>`, for text that has no other token.
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GGUFVocabulary:
    """The tokenizer fields of a file. Invariant: `types` and `scores` are empty or have an entry
    for each token, and all ids in `named` are valid."""

    #: The value of tokenizer.ggml.model.
    kind: str
    #: The value of tokenizer.ggml.pre; "" if the file has none.
    pre: str
    #: The model's architecture.
    architecture: str
    #: The model's name in lower case.
    model_name: str
    tokens: Sequence[str]
    #: A `TokenType` for each token; guessed if the file has no types.
    types: Sequence[int]
    #: A score for each token; tokens with higher scores are merged first. Empty if the file has no
    #: scores.
    scores: Sequence[float]
    #: "left right" pairs in the order of merging.
    merges: Sequence[str]
    #: Ids of special tokens by name, such as "bos_token".
    named: Mapping[str, int]
    #: For "bos", "eos" and "sep": True if the token is added around a text. For a missing name, the
    #: default of `kind` applies.
    adds: Mapping[str, bool] = field(default_factory=dict)
    #: True if a space is added at the beginning of a text; if None, the default of `kind` applies.
    add_space_prefix: bool | None = None
    #: True or None if a WordPiece tokenizer lowercases texts.
    lowercase: bool | None = None
    #: True if a WordPiece tokenizer strips accents; if None, it does so if it lowercases.
    strip_accents: bool | None = None

    @property
    def control_ids(self) -> list[int]:
        """The ids of special tokens."""
        special = (TokenType.CONTROL, TokenType.UNKNOWN)
        return [token_id for token_id, each in enumerate(self.types) if each in special]

    @property
    def user_defined_ids(self) -> list[int]:
        return [i for i, each in enumerate(self.types) if each == TokenType.USER_DEFINED]

    def ids_by_text(self) -> dict[str, int]:
        """Text -> id of all tokens with text, without the placeholders that fill the vocabulary up
        to the size of the model's embedding.

        Raises CheckpointError if two tokens have the same text.
        """
        found = {text: token_id for token_id, text in enumerate(self.tokens) if text}
        if len(found) < sum(map(bool, self.tokens)):
            twice = next(t for i, t in enumerate(self.tokens) if t and found[t] != i)
            raise CheckpointError(f"{PREFIX}tokens has {shown(twice)} twice; fetch the file again")
        for token_id, each in enumerate(self.types):
            if each == TokenType.UNUSED and self.tokens[token_id] == f"[PAD{token_id}]":
                found.pop(self.tokens[token_id], None)
        return found

    def text_of(self, name: str) -> str | None:
        """The text of the special token with this name; None if the file has no such token."""
        token_id = self.named.get(name)
        return None if token_id is None else self.tokens[token_id]


def read_vocabulary(metadata: Mapping[str, Any]) -> GGUFVocabulary:
    """Read the tokenizer fields. `metadata` are all fields of a file, with arrays as sequences.
    Raises CheckpointError that names an invalid field."""
    fields = _Fields(metadata)
    kind = fields.text(PREFIX + "model")
    if not kind:
        raise CheckpointError(
            f"it has no tokenizer ({PREFIX}model); name one by --tokenizer (tokenizer= in Python):"
            " the original model's folder or hub id"
        )
    tokens = fields.texts(PREFIX + "tokens")
    if kind not in ("none", "no_vocab") and not tokens:
        raise CheckpointError(f"{PREFIX}tokens is empty; fetch the file again")
    named = _named(fields, kind, len(tokens))
    types = fields.numbers(PREFIX + "token_type", len(tokens), int)
    if tokens and not types:
        types = guess_types(tokens, kind, set(named.values()))
        logger.warning(
            "the file has no %stoken_type, so its special tokens are guessed from their names and"
            " texts; another file of the model may have it",
            PREFIX,
        )
    adds = {name: fields.flag(f"{PREFIX}add_{name}_token") for name in ("bos", "eos", "sep")}
    return GGUFVocabulary(
        kind=kind,
        pre=fields.text(PREFIX + "pre"),
        architecture=fields.text("general.architecture"),
        model_name=fields.text("general.name").lower(),
        tokens=tokens,
        types=types,
        scores=fields.numbers(PREFIX + "scores", len(tokens), int, float),
        merges=fields.texts(PREFIX + "merges"),
        named=named,
        adds={name: value for name, value in adds.items() if value is not None},
        add_space_prefix=fields.flag(PREFIX + "add_space_prefix"),
        lowercase=fields.flag(PREFIX + "normalizer.lowercase"),
        strip_accents=fields.flag(PREFIX + "normalizer.strip_accents"),
    )


def named_texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text of the special tokens, as in tokenizer_config.json. Faster than
    `read_vocabulary`; raises the same errors."""
    fields = _Fields(metadata)
    tokens = metadata.get(PREFIX + "tokens", ())
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        fields.texts(PREFIX + "tokens")  # raises
    named = _named(fields, fields.text(PREFIX + "model"), len(tokens))
    return {name: str(tokens[token_id]) for name, token_id in named.items()}


def _named(fields: "_Fields", kind: str, num_tokens: int) -> dict[str, int]:
    found = {}
    for name, field_name in _NAMED.items():
        token_id = fields.integer(PREFIX + field_name)
        if token_id is None:
            usual = _USUAL_IDS.get(kind, {}).get(name)
            if usual is not None and usual < num_tokens:
                found[name] = usual
        elif 0 <= token_id < num_tokens:
            found[name] = token_id
        else:
            raise CheckpointError(
                f"{PREFIX}{field_name} is {token_id}, but there are {num_tokens} tokens; fetch the"
                " file again"
            )
    return found


class _Fields:
    """Access to metadata fields by name. Each method raises CheckpointError if the field has the
    wrong type."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def text(self, name: str) -> str:
        """A string field; "" if it is missing."""
        value = self._metadata.get(name, "")
        return value if isinstance(value, str) else self._refuse(name, "a string")

    def flag(self, name: str) -> bool | None:
        value = self._metadata.get(name)
        if value is None or isinstance(value, bool):
            return value
        return bool(self._refuse(name, "true or false"))

    def integer(self, name: str) -> int | None:
        value = self._metadata.get(name)
        return value if value is None or type(value) is int else self._refuse(name, "an integer")

    def texts(self, name: str) -> list[str]:
        """A field that is a list of strings; empty if it is missing."""
        found = self._list(name)
        if found and not isinstance(found[0], str):
            self._refuse(name, "a list of strings")
        return found

    def numbers(self, name: str, count: int, *kinds: type) -> list[Any]:
        """A field that is a list of numbers, one per token; empty if it is missing. `kinds` are the
        accepted Python types."""
        found = self._list(name)
        if found and type(found[0]) not in kinds:
            self._refuse(name, f"a list of numbers ({kinds[-1].__name__})")
        if found and len(found) < count:
            raise CheckpointError(
                f"{name} has {len(found)} entries, but there are {count} tokens; fetch the file"
                " again"
            )
        return found[:count]

    def _list(self, name: str) -> list[Any]:
        value = self._metadata.get(name)
        if value is None:
            return []
        if hasattr(value, "tolist"):  # a numpy array
            value = value.tolist()
        if isinstance(value, str) or not isinstance(value, Sequence):
            self._refuse(name, "a list")
        return list(value)

    def _refuse(self, name: str, wanted: str) -> Any:
        raise CheckpointError(
            f"{name} is {shown(self._metadata[name])}, but must be {wanted}; fetch the file again"
        )
