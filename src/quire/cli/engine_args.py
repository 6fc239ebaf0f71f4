"""An engine's options as an object, and as flags for a script's own argument parser.

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(parser.parse_args()))

For users of the package; quire itself does not use this module.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn, Self, TypeVar

from quire.cli.flags import ENGINE_GROUPS, SERVER_GROUPS, add_options
from quire.cli.words import Parser
from quire.compat.llm_options import COMPAT_OPTIONS
from quire.errors import unknown_name
from quire.option_fields import takes_arguments_of
from quire.options.engine_options import EngineOptions

P = TypeVar("P", bound=argparse.ArgumentParser)


class FlexibleArgumentParser(Parser):
    """An ArgumentParser that reads --max_model_len as --max-model-len.

    It also accepts flags of other engines, if they ask for behaviour that quire always has.
    """

    def __init__(self, *unnamed: Any, **options: Any) -> None:
        if unnamed:
            options["prog"] = unnamed[0]
        super().__init__(takes_foreign=True, **options)

    def parse_known_args(  # type: ignore[override]  # the base has overloads for the namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([_dashed(word) for word in words], namespace)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}\n")


def _dashed(word: str) -> str:
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


class EngineArgs(EngineOptions):
    """The options of an engine, for `from_engine_args` of `LLM` and of the other engine classes.

    The options are those of `EngineOptions`. Assigning an option checks it alone and with the
    others. Names of vLLM's options are accepted if they ask for behaviour which quire always has.
    """

    @takes_arguments_of(EngineOptions)
    def __init__(self, model: str | None = None, **options: Any) -> None:
        """Raises ConfigurationError."""
        self._copy_options(EngineOptions.from_mapping({**options, "model": model}))

    def __setattr__(self, name: str, value: Any) -> None:
        self._copy_options(EngineOptions.from_mapping({**self.as_mapping(), name: value}))

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError with advice. Python calls this only for unknown names."""
        raise unknown_name(self, name, {each: why for each, (_, why) in COMPAT_OPTIONS.items()})

    def _copy_options(self, checked: EngineOptions) -> None:
        for each in fields(EngineOptions):
            object.__setattr__(self, each.name, getattr(checked, each.name))

    @staticmethod
    def add_cli_args(parser: P) -> P:
        """Add a flag for each option to the parser. Flags that are not given are None."""
        parser.add_argument("--model", metavar="MODEL", help="folder or hub id of a model")
        for title in (*SERVER_GROUPS, *ENGINE_GROUPS):
            group = parser.add_argument_group(title)
            add_options(group, EngineOptions, title)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Make an object from the parsed arguments, ignoring those that are not engine options."""
        names = [*(each.name for each in fields(EngineOptions)), *COMPAT_OPTIONS]
        given = {name: getattr(args, name, None) for name in names}
        return cls(**{name: value for name, value in given.items() if value is not None})


class AsyncEngineArgs(EngineArgs):
    """The options of an engine for `AsyncLLM`."""
