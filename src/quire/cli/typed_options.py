"""Rewrites error messages to name the flag, key or variable that was typed.

The checks of options name fields, as `LLM(...)` has them. An engine may run in another process, so
its errors arrive as text. So `told` replaces the names in the text. Independent of quire's flags:
the parser's actions say which flag sets which field. Used by the parsers and by `main`.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from quire.compat.flags import SAME
from quire.option_fields import parse_bytes, token_count

_VALUE = r"'[^']*+'|\"[^\"]*+\"|[^\s,;()'\"]++"
_IN_PYTHON = r"(?! in Python)"
_ADVICE = "leave|lower|raise|set|give|without|needs"
_NAMES_IN_PYTHON = re.compile(r"\(('[\w.+-]+'(?:, '[\w.+-]+')*),?\)")


class Typed(NamedTuple):
    """How an option was given."""

    #: The flag, the key of the file, or the variable.
    name: str
    #: The text of the value; None for a switch.
    value: str | None = None
    #: The text between name and value.
    between: str = " "
    #: The file and the line; empty for a flag or a variable.
    place: str = ""

    def __str__(self) -> str:
        return self.name + self._shown_place

    def with_value(self, value: str) -> str:
        """The name with `value`, which a message names: as it was typed, or else a proposal."""
        place = self._shown_place if self.value and _is_equal(self.value, value) else ""
        return f"{self.name}{self.between}{self.typed_value(value)}{place}"

    def typed_value(self, value: str) -> str:
        """The text that was typed if it means `value`, or else `value`."""
        return self.value if self.value and _is_equal(self.value, value) else value

    @property
    def _shown_place(self) -> str:
        return f" ({self.place})" if self.place else ""


def _is_equal(typed: str, value: str) -> bool:
    """Whether a text that was typed, such as 4k or 2GiB, means the value of a message."""
    for read in (str, token_count, partial(parse_bytes, "")):
        with suppress(ValueError):
            if str(read(typed)) == value:
                return True
    return False


def typed_words(words: Sequence[str], actions: Mapping[str, argparse.Action]) -> dict[str, Typed]:
    """How the words of a command line give options: field -> `Typed`. `actions` are the parser's
    actions by flag."""
    found: dict[str, Typed] = {}
    rest = iter(words)
    for word in rest:
        if word == "--":
            break
        flag, equals, value = word.partition("=")
        action = actions.get(flag) or actions.get(SAME.get(flag, ""))
        if action is None:
            continue
        takes_value = action.nargs != 0
        text = value if equals else next(rest, None) if takes_value else None
        found[action.dest] = Typed(flag, text)
    return found


def told(message: str, parser: argparse.ArgumentParser, typed: Mapping[str, Typed]) -> str:
    """The message with flags in place of the fields that the parser's flags set.

    `typed` says how options were given; for other options, the parser's flag is named.
    """
    names = {
        action.dest: Typed(_flag(action))
        for action in parser._actions
        if action.option_strings and action.dest not in ("help", "debug")
    }
    names |= {dest: each for dest, each in typed.items() if dest in names}
    message = _without_python(message)
    if not names:
        return message
    listed = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    with_underscore = sorted((name for name in names if "_" in name), key=len, reverse=True)
    compound = "|".join(with_underscore) or "$^"

    def replaced(match: re.Match[str]) -> str:
        for before, name in (("start", "subject"), ("verb", "object")):
            if match[name]:
                return f"{match[before]}{names[match[name]]}"
        if match["compound"]:
            return str(names[match["compound"]])
        if match["counted"]:
            each = names[match["counted"]]
            return f"{each} is {each.typed_value(match['number'])}"
        each, value = names[match["assigned"]], match["value"].strip("'\"")
        if value in ("True", "False"):
            is_typed = value == "True" or each.name.startswith("--no-")
            return str(each) if is_typed else str(each).replace("--", "--no-", 1)
        return each.with_value(value)

    # A name of one word may be an ordinary word, so only certain forms of sentences are rewritten.
    message = re.sub(rf"\b({listed}) is (True|False)(?=[,;)]|$)", r"\1=\2", message)
    forms = (
        rf"(?<![\w./'\"-])(?<!LLM\()(?P<assigned>{listed})=(?P<value>{_VALUE}){_IN_PYTHON}",
        rf"(?<![\w./'\"-])(?P<counted>{compound}) is (?P<number>\d+)(?![\w.])",
        rf"(?P<start>^|: |; )(?P<subject>{listed})(?= (?:is|are|has|names|must)\b|: )",
        rf"(?P<verb>\b(?:{_ADVICE}) )(?P<object>{listed})(?![\w=-])",
        rf"(?<![\w./'\"-])(?P<compound>{compound})(?![\w(=./-])",
    )
    return re.sub("|".join(forms), replaced, message)


def _without_python(message: str) -> str:
    """The message with plain words in place of None and of tuples."""
    message = message.replace("must be None or ", "must be ")
    return _NAMES_IN_PYTHON.sub(lambda match: match[1].replace("'", ""), message)


def _flag(action: argparse.Action) -> str:
    """The action's first long flag, or else its first flag."""
    flags = action.option_strings
    return next((flag for flag in flags if flag.startswith("--")), flags[0])
