"""The commands' flags, made from the declarations of the options.

Parsed values have the names that the engine, the server or SamplingParams use. Flags that were not
given are not passed on, so that each component applies its own defaults. Imports no slow modules.
Called by `parser` and `main`.
"""

import argparse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import Field, fields
from typing import Any

from quire.core.memory.cache_options import AUTO, BlockSize
from quire.option_fields import (
    Kind,
    Option,
    Options,
    Switch,
    Texts,
    Tokens,
    check_each,
    declared_options,
    flag_help,
    flag_name,
    served_defaults,
    token_count,
)
from quire.options.engine_options import EngineOptions
from quire.server.config import ServerConfig

ENGINE_GROUPS = ("model", "memory", "scheduling", "computation")
"""Groups of the engine's flags, which every command with an engine has, in the order of the
help."""

SERVER_GROUPS: Mapping[str, str | None] = {
    "server": None,
    "models": "Several models, each in its own engine process; see docs/several-models.md.",
    "chat": "How messages become a prompt, and how answers are read.",
    "images": "Images in prompts of models that take them; see docs/images.md.",
    "adapters": "LoRA adapters, which a call names as its model; see docs/adapters.md.",
    "access": "Without any key, all clients are served.",
    "limits": "A call above a limit is refused with an error that names it.",
    "batches": "Files of calls are answered in the background; see docs/serving.md#batches.",
    "fleet": None,
    "recovery": None,
    "recording": "The load is recorded for replays; see docs/record-replay.md.",
    "logging": None,
}
"""Further groups of flags of `quire serve`, each with a description or None. Other commands have no
flags for engine options in these groups."""

SAMPLING_OPTIONS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")
"""Arguments of SamplingParams that are also flags. A flag's value None means the model's
default."""


def option_names(options: type[Options], groups: Collection[str]) -> tuple[str, ...]:
    """Names of the options whose flags belong to one of the groups."""
    found = declared_options(options)
    return tuple(each.name for each, declared in found if declared.group in groups)


MODEL_HELP = next(
    declared.help for each, declared in declared_options(EngineOptions) if each.name == "model"
)


class Once(argparse.Action):
    """Stores a value that may be given as a flag or as a positional argument. Refuses two different
    values."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest, None)
        if before not in (None, values):
            parser.error(f"the {self.dest} is given twice: {before} and {values}")
        setattr(namespace, self.dest, values)


# ---- given values -------------------------------------------------------------------------------


def engine_options(
    args: argparse.Namespace, options: type[Options] = EngineOptions
) -> dict[str, Any]:
    """The given engine options by name, including `model`."""
    return _given(args, ("model", *option_names(options, ENGINE_GROUPS)))


def served_engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options for `quire serve`, which has additional engine flags and other
    defaults."""
    return {**served_defaults(EngineOptions), **given_engine_options(args)}


def given_engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given to `quire serve`."""
    own = option_names(EngineOptions, SERVER_GROUPS)
    return {**engine_options(args), **_given(args, own)}


def server_options(args: argparse.Namespace) -> dict[str, Any]:
    """The given server options by ServerConfig's names. Raises ConfigurationError."""
    names = (each.name for each in fields(ServerConfig))
    given = _given(args, tuple(name for name in names if hasattr(args, name)))
    kinds = {each.name: declared.kind for each, declared in declared_options(ServerConfig)}
    for name, value in given.items():
        if isinstance(value, list):
            given[name] = kinds[name].validate(name, value, is_optional=False)
    return given


def check_served(args: argparse.Namespace) -> None:
    """Check each value without regard to the others. Raises ConfigurationError for a value that the
    server or the engine always refuses."""
    check_each(ServerConfig, server_options(args))
    check_each(EngineOptions, served_engine_options(args))


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling options by SamplingParams' names."""
    return {name: getattr(args, name) for name in SAMPLING_OPTIONS}


def _given(args: argparse.Namespace, names: Collection[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(args, name)) is not None}


# ---- the flags ----------------------------------------------------------------------------------


def add_engine(
    parser: argparse.ArgumentParser,
    options: type[Options] = EngineOptions,
    beside: type[Options] | None = None,
) -> None:
    """Add the engine's options in groups, and the options of `beside` in the same groups."""
    for title in ENGINE_GROUPS:
        group = parser.add_argument_group(title)
        add_options(group, options, title)
        if beside is not None:
            add_options(group, beside, title)


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Add all flags of `quire serve`: every option of the server and of the engine."""
    add_model_by_place(parser)
    for title, description in SERVER_GROUPS.items():
        group = parser.add_argument_group(title, description)
        if title == "server":
            _add_config(group)
            add_model_flag(group)
        add_options(group, ServerConfig, title)
        add_options(group, EngineOptions, title)
    add_engine(parser, beside=ServerConfig)


def _add_config(group: Any) -> None:
    text = "YAML file with flags; the command line wins over it"
    group.add_argument("--config", metavar="FILE", help=text)


def add_options(group: Any, options: type[Options], title: str) -> None:
    """Add the flags of the options in the group with this title."""
    for each, declared in declared_options(options):
        if declared.group == title:
            _add_option(group, each, declared)


def _add_option(group: Any, each: Field[Any], declared: Option) -> None:
    group.add_argument(
        flag_name(each, declared),
        *declared.flag.others,
        dest=each.name,
        help=flag_help(each, declared),
        **_reading(declared.kind, declared.flag.metavar),
    )


def _reading(kind: Kind, metavar: str | None) -> dict[str, Any]:
    """Keyword arguments for `add_argument` that say how argparse reads a flag's value.

    If argparse keeps a value as text, the option's kind converts it later.
    """
    if isinstance(kind, Switch):
        if kind.is_one_way:
            return {"action": "store_true", "default": None}
        return {"action": argparse.BooleanOptionalAction}
    shown = {"metavar": metavar or kind.metavar}
    if isinstance(kind, Texts):
        return shown | (
            {"action": "extend", "nargs": "+"} if kind.is_list else {"action": "append"}
        )
    read = _number_of_tokens if isinstance(kind, Tokens) else kind.number
    if isinstance(kind, BlockSize):
        read = _whole_or_auto
    return shown | ({} if read is None else {"type": read})


def _number_of_tokens(text: str) -> int | str:
    """Parse a number of tokens. Returns "auto" as it is; the option's kind interprets it, and
    negative numbers, later."""
    if text == "auto":
        return text
    try:
        is_negative = text.startswith("-") and text[1:].isdecimal()
        return int(text) if is_negative else token_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _whole_or_auto(text: str) -> int | str:
    """Parse a whole number. Returns "auto" as it is; the option's kind interprets it later."""
    if text == AUTO:
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a whole number")
    return int(text)


def positive(text: str) -> int:
    """Parse a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def seconds_between(text: str) -> float:
    """Parse the seconds between two events of /stats/events."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.25 <= seconds <= 10:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0.25 to 10")
    return seconds


def add_model_by_place(parser: argparse.ArgumentParser) -> None:
    """Add a positional MODEL, for a command that also calls `add_model_flag`."""
    parser.add_argument(
        "model",
        nargs="?",
        action=Once,
        metavar="MODEL",
        help=MODEL_HELP,
        default=argparse.SUPPRESS,  # a missing MODEL must not overwrite the value of --model
    )


def add_model_flag(parser: Any) -> None:
    """Add --model, for a command that also calls `add_model_by_place`."""
    parser.add_argument(
        "--model", action=Once, metavar="MODEL", help="the same as the positional MODEL"
    )


def add_debug(parser: argparse.ArgumentParser, default: Any) -> None:
    parser.add_argument(
        "--debug", action="store_true", default=default, help="show the traceback of an error"
    )


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    group = parser.add_argument_group(
        "sampling", "An option that is left out has the model's own default."
    )
    limit = "as many as fit" if max_tokens is None else str(max_tokens)
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        default=max_tokens,
        help=f"tokens to generate at most ({limit})",
    )
    group.add_argument(
        "--temperature", type=float, metavar="T", help="0: always the likeliest token"
    )
    group.add_argument(
        "--top-p", type=float, metavar="P", help="sample among the likeliest tokens with sum P"
    )
    group.add_argument(
        "--top-k", type=int, metavar="K", help="sample among the K likeliest tokens; 0: all"
    )
    group.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="sample among tokens at least P times as likely as the likeliest",
    )
    group.add_argument(
        "--seed", type=int, help="seed of the random numbers: makes sampling reproducible"
    )
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )
