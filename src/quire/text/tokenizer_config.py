"""Reads a model's tokenizer settings: the files beside tokenizer.json, or a GGUF file's metadata.

In a folder it reads `tokenizer_config.json`, `special_tokens_map.json` and `chat_template.json`. If
the files conflict, transformers 5 and this module prefer the same file. Called by `text.tokenizer`
and `text.chat_template`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from quire.errors import CheckpointError, shown
from quire.hub.model_files import read_json_object, shown_text
from quire.text.gguf.reading import read_gguf_settings

_STANDARD_NAMES = frozenset(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
_TEMPLATE_FILE = "chat_template.json"
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_TOKEN_FLAGS = frozenset({"single_word", "lstrip", "rstrip", "normalized", "special"})


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """The fields of a model's tokenizer configuration that affect encoding and chat templates."""

    #: Special tokens by name, such as "bos_token" and "eos_token". They are also variables of the
    #: chat template.
    named_tokens: Mapping[str, AddedToken] = field(default_factory=dict)
    #: Special tokens without a name.
    extra_special_tokens: tuple[AddedToken, ...] = ()
    #: Added tokens by id (`added_tokens_decoder`).
    added_tokens: Mapping[int, AddedToken] = field(default_factory=dict)
    #: True if special tokens written out in a text are encoded as plain text.
    split_special_tokens: bool = False
    #: The template in tokenizer_config.json (a string or a list of {name, template}) or in
    #: chat_template.json (a string); None if there is no template, or it is empty.
    chat_template: Any = None

    @property
    def special_token_texts(self) -> dict[str, str]:
        """The named tokens' texts, by name."""
        return {name: token.content for name, token in self.named_tokens.items()}


def tokenizer_fields(folder: Path) -> dict[str, Any]:
    """The unchecked fields of tokenizer_config.json; empty if the file does not exist. For a GGUF
    file: its metadata in the form of these fields. Raises CheckpointError."""
    if folder.is_file():
        return read_gguf_settings(folder)
    path = folder / "tokenizer_config.json"
    return read_json_object(path) if path.exists() else {}


def read_tokenizer_config(folder: Path) -> TokenizerConfig:
    """Read the tokenizer configuration in `folder`, which may be a GGUF file. Missing files are
    treated as empty.

    `special_tokens_map.json` is the older way to list special tokens; it is read only if
    `tokenizer_config.json` lists no added tokens. Raises CheckpointError that names the file and
    the field.
    """
    path = folder / "tokenizer_config.json"
    fields = tokenizer_fields(folder)
    if "added_tokens_decoder" not in fields:
        older = folder / "special_tokens_map.json"
        fields = {**fields, **(read_json_object(older) if older.exists() else {})}
    extra = fields.get("extra_special_tokens") or fields.get("additional_special_tokens") or ()
    named = {name: value for name, value in fields.items() if _names_token(name, value)}
    if isinstance(extra, str):  # otherwise each letter would become a token
        raise CheckpointError(
            f"{path}: the extra special tokens are {shown(extra)}, but must be a list of tokens, or"
            " an object of named ones"
        )
    if isinstance(extra, dict):
        named, extra = {**named, **extra}, ()
    try:
        return TokenizerConfig(
            named_tokens={name: _special_token(value) for name, value in named.items()},
            extra_special_tokens=tuple(_special_token(value) for value in extra),
            added_tokens=_added_tokens(fields.get("added_tokens_decoder") or {}),
            split_special_tokens=bool(fields.get("split_special_tokens", False)),
            chat_template=_chat_template(folder, fields.get("chat_template")),
        )
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path} describes a token in an unknown form ({shown_text(error)}); "
            "a token is a string or an object with a 'content'"
        ) from error


def _chat_template(folder: Path, of_tokenizer: Any) -> Any:
    """Choose between the template in chat_template.json and `of_tokenizer`, the template in
    tokenizer_config.json or a GGUF file. chat_template.json belongs to the processor of a
    multimodal model. Like transformers, prefer it only if the model has a processor."""
    if isinstance(of_tokenizer, dict):  # name -> template; transformers also accepts this form
        of_tokenizer = [{"name": name, "template": of_tokenizer[name]} for name in of_tokenizer]
    path = folder / _TEMPLATE_FILE
    has_processor = any((folder / name).is_file() for name in _PROCESSOR_FILES)
    if not path.is_file() or (of_tokenizer and not has_processor):
        return of_tokenizer or None
    template = read_json_object(path).get("chat_template")
    if not isinstance(template, str):
        raise CheckpointError(
            f"{path}: chat_template is {shown(template)}, but must be a string, the template"
        )
    return template or of_tokenizer or None


def _names_token(name: str, value: Any) -> bool:
    if value is None or not name.endswith("_token"):
        return False
    has_text = isinstance(value, str) or (isinstance(value, dict) and "content" in value)
    return name in _STANDARD_NAMES or has_text


def _added_tokens(entries: Mapping[str, Any]) -> dict[int, AddedToken]:
    return {int(token_id): _token(entry) for token_id, entry in entries.items()}


def _special_token(value: Any) -> AddedToken:
    token = _token(value)
    token.special = True
    return token


def _token(value: Any) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True)
    flags = {name: flag for name, flag in value.items() if name not in ("content", "__type")}
    if unknown := sorted(flags.keys() - _TOKEN_FLAGS):
        raise ValueError(f"{value['content']!r} has the unknown flag {unknown[0]!r}")
    return AddedToken(value["content"], **flags)
