"""`--config FILE`: reads a command's flags from a YAML file.

Its keys are the flags, with dashes or underscores:

    model: Qwen/Qwen3-0.6B
    port: 8080
    max_num_seqs: 32
    enable-prefix-caching: false
    api-key: [alice:secret-1, bob:secret-2]     # a flag that may be repeated

Each entry is turned into command-line words, which are checked like words that a user types. Errors
name the file and the line. A flag on the command line overrides the same flag in the file. Texts
are read as written (`revision: 1.10` is "1.10"). Called by `parser`.
"""

import argparse
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.cli.words import Parser
from quire.compat.flags import KNOWN
from quire.errors import ConfigurationError, did_you_mean
from quire.plugins import PLUGIN_FLAG

_YAML = "tag:yaml.org,2002:"
_TRUE = ("true", "yes", "on")


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of the file with its values."""

    flag: str
    #: One or more texts as they are written, or one boolean.
    values: tuple[str, ...] | bool
    line: int
    #: Whether the values are written as a list.
    is_list: bool = False


class ConfiguredParser(Parser):
    """A Parser with the flag `--config` that also reads words from the file named there."""

    #: Called with a namespace that has only one flag; raises ConfigurationError if the command
    #: would refuse its value. None if values are not checked while the file is read.
    check: Callable[[Any], None] | None = None

    def parse_known_args(  # type: ignore[override]  # the base has overloads for the namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        found, rest = super().parse_known_args(args, namespace)
        path = getattr(found, "config", None)
        if path is None or args is None:
            return found, rest
        words = self._words_of(path, self._given(found))
        return super().parse_known_args([*words, *args], namespace)

    def _check_values(self, namespace: Any) -> None:
        """Report a value that the command would refuse, with the line that has it."""
        try:
            if self.check is not None:
                self.check(namespace)
        except ConfigurationError as error:
            self.error(str(error))

    def _given(self, namespace: Any) -> set[str]:
        """Names of the options that were given: those whose values are neither None nor the
        default."""
        return {
            name
            for name, value in vars(namespace).items()
            if value is not None and value != self.get_default(name)
        }

    def _words_of(self, path: str, given: Collection[str]) -> list[str]:
        """The command-line words that the file adds, without options in `given` (namespace
        names)."""
        try:
            # Plugins come first, since they register names that other entries use.
            entries = sorted(read_entries(path), key=lambda entry: entry.flag != PLUGIN_FLAG)
        except ConfigurationError as error:
            self.error(str(error))
        words: list[str] = []
        for entry in entries:
            self.blame = f"{path}, line {entry.line}: "
            mine = self._words_of_entry(entry)
            # Parse each entry separately, so that an error names the entry's line.
            alone, _ = super().parse_known_args(mine, None)
            self._check_values(alone)
            if not self._given(alone) & set(given):
                words += mine
        self.blame = ""
        return words

    def _words_of_entry(self, entry: Entry) -> list[str]:
        flag, values = entry.flag, entry.values
        action = self._option_string_actions.get(flag)
        if action is None and flag not in KNOWN:
            self.error(
                f"there is no option {flag}{did_you_mean(flag, self._option_string_actions)}"
            )
        if flag in ("--config", "--help"):
            self.error(f"{flag} belongs on the command line")
        takes_value = action is not None and action.nargs != 0
        if isinstance(values, bool):
            if takes_value:
                self.error(f"{flag} needs a value, but has {str(values).lower()}")
            return [flag] if values else self._words_of_no(flag)
        if action is not None and not takes_value:
            self.error(f"{flag} must be true or false")
        if entry.is_list and not _may_be_repeated(action):
            self.error(f"{flag} takes one value, but has a list of {len(values)}")
        return [f"{flag}={value}" for value in values]

    def _words_of_no(self, flag: str) -> list[str]:
        """The words for a switch that the file sets to false."""
        opposite = flag.replace("--", "--no-", 1)
        if opposite in self._option_string_actions or opposite in KNOWN:
            return [opposite]
        if flag not in self._option_string_actions or flag.startswith("--no-"):
            self.error(f"{flag} can't be false; leave it out, or write its opposite")
        return []  # false is the default of a switch without an opposite


def _may_be_repeated(action: argparse.Action | None) -> bool:
    # argparse has no public name for the class behind action="append".
    return type(action).__name__ == "_AppendAction"


def read_entries(path: str) -> list[Entry]:
    """Read the file's entries, in order. Raises ConfigurationError, which names the file and the
    line."""
    import yaml  # imported only if needed, as it takes long to load

    # First, parse the file as YAML, and report its errors with the line.
    try:
        text = Path(path).read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigurationError(f"{path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not text in UTF-8: {error}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = "" if mark is None else f", line {mark.line + 1}"
        raise ConfigurationError(f"{path}{at}: not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigurationError(f"{path} must hold flags and values, as in 'port: 8000'")
    # Then turn each key into a flag. Each flag may occur once.
    entries: dict[str, Entry] = {}
    for key, value in root.value:
        line = key.start_mark.line + 1
        flag = "--" + str(key.value).replace("_", "-").lstrip("-")
        if flag in entries:
            raise ConfigurationError(
                f"{path}, line {line}: {key.value} stands in line {entries[flag].line} already"
            )
        values = _values(f"{path}, line {line}: {key.value}", value)
        entries[flag] = Entry(flag, values, line, is_list=value.tag == f"{_YAML}seq")
    return list(entries.values())


def _values(place: str, node: Any) -> tuple[str, ...] | bool:
    """The texts of a value or of a list of values, or a boolean."""
    if node.tag == f"{_YAML}bool":
        return str(node.value).lower() in _TRUE
    nodes = node.value if node.tag == f"{_YAML}seq" else [node]
    if not nodes or any(each.tag == f"{_YAML}null" for each in nodes):
        raise ConfigurationError(f"{place} has no value; give it one, or take the line out")
    if any(not isinstance(each.value, str) for each in nodes):
        raise ConfigurationError(f"{place} must be a value or a list of values")
    return tuple(each.value for each in nodes)
