"""Converts a GGUF file's special tokens and chat templates to fields of tokenizer_config.json.

    tokenizer.chat_template                 the default template
    tokenizer.chat_templates                the names of further templates
    tokenizer.chat_template.NAME            each further template
Called by `text.tokenizer_config`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import CheckpointError, shown
from quire.text.gguf.vocabulary import PREFIX, named_texts

_TEMPLATE = "tokenizer.chat_template"
_NAMES = "tokenizer.chat_templates"


def read_settings(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A file's metadata in the form of tokenizer_config.json. Raises CheckpointError that names the
    invalid field."""
    settings: dict[str, Any] = {**named_texts(metadata)}
    for name in ("bos", "eos"):
        flag = metadata.get(f"{PREFIX}add_{name}_token")
        if isinstance(flag, bool):
            settings[f"add_{name}_token"] = flag
    templates = _templates(metadata)
    if list(templates) == ["default"]:
        settings["chat_template"] = templates["default"]
    elif templates:
        settings["chat_template"] = [
            {"name": name, "template": template} for name, template in templates.items()
        ]
    return settings


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    names = metadata.get(_NAMES, ())
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise CheckpointError(
            f"{_NAMES} is {shown(names)}, but must be a list of names; fetch the file again"
        )
    keys = {"default": _TEMPLATE, **{name: f"{_TEMPLATE}.{name}" for name in names}}
    # Some converters write an empty template if the model has none.
    found = {name: metadata[key] for name, key in keys.items() if metadata.get(key, "") != ""}
    for name, template in found.items():
        if not isinstance(template, str):
            raise CheckpointError(
                f"{keys[name]} is {shown(template)}, but must be a string; fetch the file again"
            )
    return found
