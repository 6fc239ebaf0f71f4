"""Reads a command's flags from a YAML file, `--config FILE`, and from the environment.

The file's keys are the flags, with dashes or underscores:

    model: Qwen/Qwen3-0.6B
    port: 8080
    max_num_seqs: 32
    enable-prefix-caching: false
    api-key: [alice:secret-1, bob:secret-2]     # a flag that may be repeated

In the environment, `QUIRE_MAX_NUM_SEQS=32` stands for `--max-num-seqs 32`. A switch is true or
false, and the values of a flag that may be repeated are separated by commas.

Each entry is turned into command-line words, which are checked like words that a user types. Errors
name the file and the line, or the variable. A flag on the command line overrides the same flag in
the environment, which overrides the file's. Texts are read as written (`revision: 1.10` is "1.10").
Called by `parser`.
"""

import argparse
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.cli.typed_options import Typed, told, typed_words
from quire.cli.words import Parser
from quire.compat.flags import KNOWN, SAME
from quire.errors import ConfigurationError, did_you_mean
from quire.plugins import PLUGIN_FLAG

_YAML = "tag:yaml.org,2002:"
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")

_PREFIX = "QUIRE_"
_READ_ELSEWHERE = ("QUIRE_API_KEYS", "QUIRE_DEBUG", "QUIRE_LOG_LEVEL")
_OF_KUBERNETES = re.compile(r"QUIRE_(SERVICE_|PORT_|PORT=tcp:)")
"""Beginnings of variables that Kubernetes sets in a pod beside a service with the name `quire`."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of the file, or one variable, with its values."""

    flag: str
    #: The key or the variable, as it is written.
    name: str
    #: The texts as written in the file, at least one; or a boolean.
    values: tuple[str, ...] | bool
    #: The file and the line, or the variable.
    place: str
    #: Whether the values are written as a list.
    is_list: bool = False

    @property
    def is_variable(self) -> bool:
        """Whether it is a variable of the environment."""
        return self.place == self.name

    def typed(self, *, has_place: bool) -> Typed:
        """The entry as messages show it, with its place in the file if `has_place`."""
        value = None if isinstance(self.values, bool) else ",".join(self.values)
        if self.is_variable:
            return Typed(self.name, value, "=")
        return Typed(self.name, value, ": ", self.place if has_place else "")


class ConfiguredParser(Parser):
    """A Parser that also reads words from the environment, and from the file that `--config`
    names."""

    #: The variables of the environment.
    environment: Mapping[str, str] = {}
    #: Whether a variable that seems to misspell a flag is refused.
    refuses_misspelt = False
    #: The entries of the file and of the environment that count.
    _used: list[Entry]
    #: Called with a namespace that has only one flag; raises ConfigurationError if the command
    #: would refuse its value. None if values are not checked while the file is read.
    check: Callable[[Any], None] | None = None

    def parse_known_args(  # type: ignore[override]  # the base has overloads for the namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        found, rest = super().parse_known_args(args, namespace)
        if args is None:
            return found, rest
        self._used = []
        words = self._words_of(self._variables(), self._given(found))
        path = getattr(found, "config", None)
        if path is None and "--config" in self._option_string_actions:
            path = self.environment.get(f"{_PREFIX}CONFIG")
        if path is not None:
            given = self._given(found) | self._names_of(words)
            words = [*self._words_of_file(path, given), *words]
        if words:
            found, rest = super().parse_known_args([*words, *args], namespace)
        self.typed = {
            **{self._dest(entry): entry.typed(has_place=True) for entry in self._used},
            **typed_words(args, self._option_string_actions),
        }
        return found, rest

    def parse_entries(self, entries: Sequence[Entry]) -> Any:
        """The namespace of a file's entries alone, without the environment."""
        self._used = []
        return super().parse_known_args(self._words_of(entries, ()))[0]

    def _dest(self, entry: Entry) -> str:
        """The name in the namespace of the option that an entry gives."""
        action = self._option_string_actions.get(SAME.get(entry.flag, entry.flag))
        return entry.flag if action is None else action.dest

    def _names_of(self, words: Sequence[str]) -> set[str]:
        """Names of the options that these words give."""
        return self._given(self._parsed_alone(words)) if words else set()

    def _parsed_alone(self, words: Sequence[str]) -> Any:
        """The namespace of an entry's words, without the arguments that the command needs."""
        needed = [each for each in self._actions if each.required]
        for each in needed:
            each.required = False
        try:
            return super().parse_known_args(words, None)[0]
        finally:
            for each in needed:
                each.required = True

    def _check_values(self, namespace: Any, entry: Entry) -> None:
        """Report a value that the command would refuse, with the line or variable that has it."""
        try:
            if self.check is not None:
                self.check(namespace)
        except ConfigurationError as error:
            text = told(str(error), self, {self._dest(entry): entry.typed(has_place=False)})
            if text.startswith(entry.place):
                self.blame = ""
            self.error(text)

    def _given(self, namespace: Any) -> set[str]:
        """Names of the options that were given: those whose values are neither None, nor the
        default, nor the empty list of a positional argument that may be missing."""
        return {
            name
            for name, value in vars(namespace).items()
            if value not in (None, []) and value != self.get_default(name)
        }

    def _variables(self) -> list[Entry]:
        """The entries of the environment for flags of this command."""
        found = []
        for name, value in sorted(self.environment.items()):
            if not name.startswith(_PREFIX) or name in (*_READ_ELSEWHERE, f"{_PREFIX}CONFIG"):
                continue
            if _OF_KUBERNETES.match(f"{name}={value}"):
                continue
            flag = "--" + name.removeprefix(_PREFIX).lower().replace("_", "-")
            action = self._option_string_actions.get(flag)
            if action is not None:
                found.append(self._variable(name, flag, action, value))
            elif hint := self._hint(flag):
                self.error(f"{name} in the environment stands for no option{hint}")
        return found

    def _hint(self, flag: str) -> str:
        """The flag that a variable seems to misspell, as a clause; empty if there is none."""
        return did_you_mean(flag, self._option_string_actions) if self.refuses_misspelt else ""

    def _variable(self, name: str, flag: str, action: argparse.Action, value: str) -> Entry:
        if action.nargs == 0:
            if value.lower() not in (*_TRUE, *_FALSE):
                self.error(f"{name} is {value!r}, but must be true or false")
            return Entry(flag, name, value.lower() in _TRUE, name)
        if not _may_be_repeated(action):
            return Entry(flag, name, (value,), name)
        return Entry(flag, name, tuple(filter(None, value.split(","))), name, is_list=True)

    def _words_of_file(self, path: str, given: Collection[str]) -> list[str]:
        """The words that the file adds, without options in `given` (namespace names)."""
        try:
            entries = read_entries(path)
        except ConfigurationError as error:
            self.error(str(error))
        return self._words_of(entries, given)

    def _words_of(self, entries: Sequence[Entry], given: Collection[str]) -> list[str]:
        """The command-line words that the entries add, without options in `given` (namespace
        names)."""
        words: list[str] = []
        # Plugins come first, since they register names that other entries use.
        for entry in sorted(entries, key=lambda entry: entry.flag != PLUGIN_FLAG):
            self.blame = f"{entry.place}: "
            mine = self._words_of_entry(entry)
            # Parse each entry separately, so that an error names the entry's line.
            alone = self._parsed_alone(mine)
            self._check_values(alone, entry)
            if not self._given(alone) & set(given):
                words += mine
                self._used.append(entry)
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
    root = read_yaml(path)
    if root is None:
        return []
    if not isinstance(root.value, list) or root.id != "mapping":
        raise ConfigurationError(f"{path} must hold flags and values, as in 'port: 8000'")
    return entries_of(path, root)


def read_yaml(path: str) -> Any:
    """The file's root node as yaml composes it; None for an empty file. Raises ConfigurationError,
    which names the file and the line."""
    import yaml  # imported only if needed, as it takes long to load

    try:
        text = Path(path).read_text(encoding="utf-8")
        return yaml.compose(text, Loader=yaml.SafeLoader)
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


def entries_of(path: str, root: Any) -> list[Entry]:
    """Turn each key of a mapping's node into a flag. Each flag may occur once. Raises
    ConfigurationError."""
    entries: dict[str, Entry] = {}
    for key, value in root.value:
        line = key.start_mark.line + 1
        flag = "--" + str(key.value).replace("_", "-").lstrip("-")
        if flag in entries:
            earlier = entries[flag].place.removeprefix(f"{path}, ")
            raise ConfigurationError(
                f"{path}, line {line}: {key.value} stands in {earlier} already"
            )
        values = _values(f"{path}, line {line}: {key.value}", value)
        place = f"{path}, line {line}"
        is_list = value.tag == f"{_YAML}seq"
        entries[flag] = Entry(flag, str(key.value), values, place, is_list=is_list)
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
