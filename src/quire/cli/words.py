"""An argument parser that refuses abbreviations and suggests corrections for misspelt words.

`--help=WORD` searches the help. Independent of quire's flags. Used by the modules that add flags.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from quire.cli.typed_options import Typed, told, typed_words
from quire.compat.flags import translate_flags
from quire.errors import did_you_mean

DO_WITHOUT_COMMAND = {"-h", "--help", "--version", "--print-completion"}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that refuses abbreviations, and suggests the nearest name after a
    mistake."""

    def __init__(
        self,
        *,
        commands: Iterable[str] = (),
        moved: Mapping[str, str] | None = None,
        takes_foreign: bool = False,
        **options: Any,
    ) -> None:
        """`moved` maps each former or foreign sub-command or flag to a sentence that names what to
        type instead."""
        super().__init__(**options, allow_abbrev=False)
        #: Names of the parser's sub-commands; empty if it has none.
        self._commands = tuple(commands)
        #: Maps each former or foreign sub-command or flag to a sentence that names what to type
        #: instead.
        self._moved = moved or {}
        #: Whether the parser accepts flags of other engines (`compat.flags`).
        self._takes_foreign = takes_foreign
        #: The origin of the parsed words, such as a file and line; printed before error messages.
        self.blame = ""
        #: How the options were given, by the names in the parsed namespace.
        self.typed: dict[str, Typed] = {}

    def parse_known_args(  # type: ignore[override]  # the base has overloads for the namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        if args is not None:
            self.typed = typed_words(args, self._option_string_actions)
            if self._takes_foreign:
                args = translate_flags(args, self._option_string_actions, self.error)
            self._refuse_unknown(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"quire: error: {self.blame}{message} (see '{self.prog} --help')\n")

    def chosen(self, args: argparse.Namespace) -> "Parser":
        """The parser of the command that the parsed arguments name, or this one."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                found = action.choices.get(str(getattr(args, action.dest, None)))
                return found.chosen(args) if isinstance(found, Parser) else self
        return self

    def told(self, message: str) -> str:
        """The message of an error, with what was typed in place of the names of options."""
        return told(message, self, self.typed)

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        """Refuse the first unknown flag or command, before argparse reports another error."""
        flags = list(self._option_string_actions)
        is_value = False
        for word in words:
            if word == "--":
                return
            if is_value:
                is_value = False
                continue
            if self._commands and not word.startswith("-"):
                if word not in self._commands:
                    self.error(f"there is no command {word!r}{self._advice(word, self._commands)}")
                return
            flag, equals, value = word.partition("=")
            if flag == "--help" and value:
                self._print_help_about(value)
            if _looks_like_a_flag(flag) and flag not in flags:
                self.error(f"there is no option {flag}{self._advice(flag, flags)}")
            # Before the command, skip a flag's value, so that it is not taken for the command.
            # After the command, argparse pairs flags with values.
            is_value = bool(self._commands) and not equals and self._takes_a_value(flag)
        given = {word.partition("=")[0] for word in words}
        if self._commands and not DO_WITHOUT_COMMAND & given:
            self.error(f"name a command: {', '.join(self._commands)}")

    def _print_help_about(self, topic: str) -> NoReturn:
        """Print the group of options with this title, or else the options whose name or text has
        these words. Then exit."""
        wanted = topic.lower()
        groups = [group for group in self._action_groups if group._group_actions]
        named = [group for group in groups if (group.title or "").lower() == wanted]
        formatter = self._get_formatter()
        for group in named or groups:
            actions = group._group_actions
            if not named:
                actions = [each for each in actions if wanted in _searched_text(each)]
            if actions:
                formatter.start_section(group.title)
                formatter.add_arguments(actions)
                formatter.end_section()
        found = formatter.format_help()
        if not found:
            titles = ", ".join(str(group.title) for group in groups)
            self.error(f"no option is about {topic!r}; the groups of options are {titles}")
        self._print_message(found, sys.stdout)
        self.exit()

    def _advice(self, word: str, known: Iterable[str]) -> str:
        """A clause about what to type instead of an unknown word; empty if nothing is near."""
        moved = self._moved.get(word)
        return f"; {moved}" if moved else did_you_mean(word, known)

    def _takes_a_value(self, flag: str) -> bool:
        action = self._option_string_actions.get(flag)
        return action is not None and action.nargs is None


def _searched_text(action: argparse.Action) -> str:
    return " ".join([*action.option_strings, action.help or ""]).lower()


def _looks_like_a_flag(word: str) -> bool:
    # As in argparse, a lone dash, a negative number and a text with spaces are values.
    if not word.startswith("-") or word == "-" or " " in word:
        return False
    return re.fullmatch(r"-\d+|-\d*\.\d+", word) is None
