"""Reads the file of `quire serve --models FILE`, which lists the models of a server.

    - name: chat                       # for clients; without it, the model
      aliases: [gpt-4o-mini, default]
      model: Qwen/Qwen3-0.6B           # a folder, a hub id, or a GGUF file
      pinned: true                     # loaded at the start and never unloaded
      memory: 4GiB                     # for weights and KV cache; without it, computed
      max-model-len: 8192              # and any other flag of an engine
    - name: embed
      model: /models/all-minilm-l6-v2
      idle-unload: 300

The other keys are flags of `quire serve`, read as in a file of `--config`. Called by `main`.
"""

import argparse
from typing import Any

from quire.cli.config_file import ConfiguredParser, Entry, entries_of, read_yaml
from quire.cli.flags import (
    add_serve,
    check_served,
    given_engine_options,
    served_engine_options,
    server_options,
)
from quire.errors import ConfigurationError
from quire.hub.model_folder import EMBEDDED_MODEL_NAME
from quire.option_fields import Bytes
from quire.server.listed_model import MODEL_OPTIONS, ListedModel

_OWN = ("--name", "--aliases", "--memory", "--pinned")
_OF_ONE_MODEL = ("model", "revision", "tokenizer", "tokenizer_revision")
"""Options on the command line that can't hold for several models."""


def read_models(path: str, args: argparse.Namespace) -> list[ListedModel]:
    """The models in the file. Engine options on the command line, `args`, hold for each model that
    does not set them itself. Raises ConfigurationError, which names the file and the line."""
    given = [name for name in _OF_ONE_MODEL if getattr(args, name, None) is not None]
    if given:
        raise ConfigurationError(f"{given[0]} and models are both given; write it in {path}")
    root = read_yaml(path)
    if root is None or root.id != "sequence" or not root.value:
        raise ConfigurationError(f"{path} must be a list of models, each of which begins with '- '")
    return [_read_model(path, node, args) for node in root.value]


def _read_model(path: str, node: Any, args: argparse.Namespace) -> ListedModel:
    place = f"{path}, line {node.start_mark.line + 1}"
    if node.id != "mapping":
        raise ConfigurationError(f"{place}: a model must have keys and values, as in 'name: chat'")
    entries = {entry.flag: entry for entry in entries_of(path, node)}
    own = {flag: entries.pop(flag) for flag in _OWN if flag in entries}
    # The other keys are parsed as the flags of a server that has only this model.
    parser = ConfiguredParser(prog="quire serve", takes_foreign=True)
    add_serve(parser)
    parser.check = check_served
    found = parser.parse_entries(list(entries.values()))
    server = server_options(found)
    for name in server:
        if name not in MODEL_OPTIONS:
            raise ConfigurationError(
                f"{place}: {name} holds for the whole server; give it on the command line"
            )
    engine = {**served_engine_options(args), **given_engine_options(found)}
    names = (_text(own.get("--name")) or found.model or EMBEDDED_MODEL_NAME, *_texts(own))
    memory = _text(own.get("--memory"))
    return ListedModel(
        tuple(dict.fromkeys(names)),
        engine,
        server,
        memory_bytes=None if memory is None else _bytes(own["--memory"], memory),
        is_pinned=_switch(own.get("--pinned")),
    )


def _text(entry: Entry | None) -> str | None:
    if entry is None:
        return None
    if isinstance(entry.values, bool) or entry.is_list:
        raise ConfigurationError(f"{entry.place}: {entry.name} must be one text")
    return entry.values[0]


def _texts(own: dict[str, Entry]) -> tuple[str, ...]:
    entry = own.get("--aliases")
    if entry is None:
        return ()
    if isinstance(entry.values, bool):
        raise ConfigurationError(f"{entry.place}: {entry.name} must be a list of texts")
    return entry.values


def _bytes(entry: Entry, text: str) -> int:
    try:
        value = int(text) if text.isdecimal() else text
        return int(Bytes().validate(entry.name, value, is_optional=False))
    except ConfigurationError as error:
        raise ConfigurationError(f"{entry.place}: {error}") from error


def _switch(entry: Entry | None) -> bool:
    if entry is not None and not isinstance(entry.values, bool):
        raise ConfigurationError(f"{entry.place}: {entry.name} must be true or false")
    return entry is not None and bool(entry.values)
