"""Options as fields of dataclasses: declared once, checked here.

    @dataclass(frozen=True)
    class StepOptions(Options):
        max_num_seqs: int = option(
            64, Whole(1), group="scheduling", help="sequences per step at most"
        )

Such a field is all that an option needs: flags of the command line, keys of a YAML file, arguments
of `LLM(...)`, checks and the reference in docs/python.md are made from it. A component declares the
options that it obeys in a frozen dataclass of its own; `engine_options` joins them.
Knows no option and no parser. Only light imports: `quire --version` comes through this file.
"""

import inspect
import json
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from fractions import Fraction
from typing import Any, ClassVar, Concatenate, ParamSpec, Protocol, TypeVar, get_args

from quire.errors import ConfigurationError

P = ParamSpec("P")
S = TypeVar("S")

_METADATA = "option"
_NOT_GIVEN: Any = object()
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
}


class Kind(ABC):
    """What values an option takes.

    metavar: stands for a value in the help of its flag. number: as what its flag is read; None:
    as text, which `settle` takes.
    """

    metavar: ClassVar[str | None] = None
    number: ClassVar[type[int] | type[float] | None] = None

    @abstractmethod
    def settle(self, name: str, value: Any, *, is_optional: bool) -> Any:
        """The value in the type of the field. is_optional: None is one of its values; it never
        comes here. Raises ConfigurationError that names the option, the value and the bound."""

    def names(self) -> tuple[str, ...]:
        """The values, where they are a few names."""
        return ()


@dataclass(frozen=True, slots=True)
class Switch(Kind):
    """True or False. is_one_way: its flag has no opposite."""

    is_one_way: bool = False

    def settle(self, name: str, value: Any, *, is_optional: bool) -> bool:
        if isinstance(value, bool):
            return value
        allowed = "True, False or None" if is_optional else "True or False"
        raise ConfigurationError(f"{name} is {value!r}, but must be {allowed}")


@dataclass(frozen=True, slots=True)
class Whole(Kind):
    """A whole number from `minimum` to `maximum` (None: no bound)."""

    minimum: int = 0
    maximum: int | None = None
    metavar: ClassVar[str | None] = "N"
    number: ClassVar[type[int] | type[float] | None] = int

    def settle(self, name: str, value: Any, *, is_optional: bool) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigurationError(f"{name} is {value!r}, but must be a whole number")
        if value < self.minimum:
            raise ConfigurationError(f"{name} is {value}, but must be at least {self.minimum}")
        if self.maximum is not None and value > self.maximum:
            raise ConfigurationError(f"{name} is {value}, but must be at most {self.maximum}")
        return value


class Tokens(Whole):
    """A number of tokens, which may be written as 4k; "auto" and -1 are None, where it is one."""

    def settle(self, name: str, value: Any, *, is_optional: bool) -> Any:
        if is_optional and value in ("auto", -1):
            return None
        if isinstance(value, str):
            try:
                value = token_count(value)
            except ValueError as error:
                raise ConfigurationError(f"{name}: {error}") from error
        return Whole.settle(self, name, value, is_optional=is_optional)


@dataclass(frozen=True, slots=True)
class PowerOfTwo(Kind):
    """A power of two from `minimum` to `maximum`."""

    minimum: int
    maximum: int
    metavar: ClassVar[str | None] = "N"
    number: ClassVar[type[int] | type[float] | None] = int

    def settle(self, name: str, value: Any, *, is_optional: bool) -> int:
        number = Whole(self.minimum).settle(name, value, is_optional=is_optional)
        if number > self.maximum or number & (number - 1):
            raise ConfigurationError(
                f"{name} is {number}, but must be a power of two from {self.minimum} to"
                f" {self.maximum}"
            )
        return number


@dataclass(frozen=True, slots=True)
class Bytes(Kind):
    """A size: bytes, or text such as "2GiB"."""

    minimum: int = 1
    metavar: ClassVar[str | None] = "SIZE"

    def settle(self, name: str, value: Any, *, is_optional: bool) -> int:
        size = parse_bytes(name, value)
        return Whole(self.minimum).settle(name, size, is_optional=is_optional)


@dataclass(frozen=True, slots=True)
class Share(Kind):
    """A part of a whole: above 0 and at most 1."""

    metavar: ClassVar[str | None] = "X"
    number: ClassVar[type[int] | type[float] | None] = float

    def settle(self, name: str, value: Any, *, is_optional: bool) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and 0 < value <= 1:
            return value  # type: ignore[no-any-return]
        raise ConfigurationError(f"{name} is {value!r}, but must be above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class Seconds(Kind):
    """A time above 0, and finite."""

    metavar: ClassVar[str | None] = "S"
    number: ClassVar[type[int] | type[float] | None] = float

    def settle(self, name: str, value: Any, *, is_optional: bool) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigurationError(f"{name} is {value!r}, but must be a number of seconds")
        if not 0 < value < math.inf:
            raise ConfigurationError(f"{name} is {value:g}, but must be above 0")
        return value


@dataclass(frozen=True, slots=True)
class Text(Kind):
    """Text. what: it must be, where empty text is refused. is_path: a `pathlib.Path` will do."""

    what: str = ""
    is_path: bool = False

    def settle(self, name: str, value: Any, *, is_optional: bool) -> str:
        if self.is_path and isinstance(value, os.PathLike):
            value = os.fspath(value)
        if isinstance(value, str) and (value or not self.what):
            return value
        raise ConfigurationError(f"{name} is {value!r:.80}, but must be {self.what or 'text'}")


@dataclass(frozen=True, slots=True)
class Pattern(Kind):
    """Text that matches the regular expression `pattern` as a whole. what: it must be."""

    pattern: str
    what: str

    def settle(self, name: str, value: Any, *, is_optional: bool) -> str:
        if isinstance(value, str) and re.fullmatch(self.pattern, value):
            return value
        raise ConfigurationError(f"{name} is {value!r}, but must be {self.what}")


@dataclass(frozen=True, slots=True)
class OneOf(Kind):
    """One of a few names. choices: these, or a function that returns those that there are now.
    others: other name -> the name that it means. listed: how a refusal prints the names."""

    choices: Collection[str] | Callable[[], Collection[str]]
    others: tuple[tuple[str, str], ...] = ()
    listed: Callable[[tuple[str, ...]], str] = str
    metavar: ClassVar[str | None] = "NAME"

    def settle(self, name: str, value: Any, *, is_optional: bool) -> str:
        known = self.names()
        meant = dict(self.others).get(value, value) if isinstance(value, str) else value
        if isinstance(meant, str) and meant in known:
            return meant
        none = "None or " if is_optional else ""
        raise ConfigurationError(
            f"{name} is {value!r}, but must be {none}one of {self.listed(known)}"
        )

    def names(self) -> tuple[str, ...]:
        return tuple(self.choices() if callable(self.choices) else self.choices)


@dataclass(frozen=True, slots=True)
class Texts(Kind):
    """Any number of texts; a flag that may be repeated. what: one of them is. reads_json: a text
    may also be a list of them in JSON. is_secret: no traceback shows them. is_list: a flag takes
    several at once."""

    what: str = "text"
    reads_json: bool = False
    is_secret: bool = False
    is_list: bool = False

    def settle(self, name: str, value: Any, *, is_optional: bool) -> tuple[str, ...]:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
            raise ConfigurationError(f"{name} must be a list of texts")
        if not self.reads_json:
            return tuple(texts)
        return tuple(part for text in texts for part in self._parts(name, text))

    def _parts(self, name: str, text: str) -> list[str]:
        if not text.startswith("["):
            return [text]
        try:
            found = json.loads(text)
        except json.JSONDecodeError:
            found = None
        if not isinstance(found, list) or not all(isinstance(part, str) for part in found):
            raise ConfigurationError(
                f"{name} is {text!r:.80}, but must be {self.what}, or a list of them in JSON"
            )
        return found


@dataclass(frozen=True, slots=True)
class JsonObject(Kind):
    """An object of JSON, as a mapping or as its text."""

    metavar: ClassVar[str | None] = "JSON"

    def settle(self, name: str, value: Any, *, is_optional: bool) -> dict[str, Any]:
        try:
            found = json.loads(value) if isinstance(value, str) else value
        except json.JSONDecodeError:
            found = None
        if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
            raise ConfigurationError(f"{name} is {value!r:.80}, but must be an object in JSON")
        return dict(found)


@dataclass(frozen=True, slots=True)
class Flag:
    """How an option looks on the command line, where that is not what its name and kind say.

    name: instead of the option's, with dashes. others: more names. metavar: stands for its value.
    shown: the default as the help prints it ("": not at all). served: the default of `quire serve`.
    """

    name: str | None = None
    others: tuple[str, ...] = ()
    metavar: str | None = None
    shown: str | None = None
    served: Any = _NOT_GIVEN


@dataclass(frozen=True, slots=True)
class Option:
    """What is declared of an option beside its name, type and default; see `option`."""

    kind: Kind
    help: str
    doc: str
    group: str | None
    flag: Flag


def option(
    default: Any,
    kind: Kind,
    *,
    help: str,
    group: str | None = None,
    doc: str = "",
    flag: Flag | None = None,
) -> Any:
    """A field of a dataclass that is an option. Its annotation says whether it may be None.

    help: a line for the command line; "{names}" in it stands for the kind's names. doc: what the
        reference says, where that is more. group: of flags under which it stands; None: no flag.
    """
    declared = Option(kind, help, doc or help, group, flag or Flag())
    is_secret = isinstance(kind, Texts) and kind.is_secret
    return field(default=default, repr=not is_secret, metadata={_METADATA: declared})


class Options:
    """Base of the dataclasses whose fields are options. Invariant: each value is one that its
    declaration allows, and `_check_together` accepts them all together."""

    def __post_init__(self) -> None:
        for each, declared in declared_options(type(self)):
            value = _settled(each, declared, getattr(self, each.name))
            object.__setattr__(self, each.name, value)  # frozen: the dataclass's own way
        self._check_together()

    def part(self, options: type["Options"]) -> dict[str, Any]:
        """The values of one component's options, by name."""
        return {each.name: getattr(self, each.name) for each, _ in declared_options(options)}

    def _check_together(self) -> None:
        """What options must be together; an override calls that of `super()`. Raises
        ConfigurationError."""


def declared_options(options: type) -> Iterator[tuple[Field[Any], Option]]:
    """The fields that are options, in their order."""
    for each in fields(options):
        if _METADATA in each.metadata:
            yield each, each.metadata[_METADATA]


def check_each(options: type[Options], given: Mapping[str, Any]) -> None:
    """Check values one by one, whatever the others are. Raises ConfigurationError."""
    for each, declared in declared_options(options):
        if each.name in given:
            _settled(each, declared, given[each.name])


def _settled(each: Field[Any], declared: Option, value: Any) -> Any:
    is_optional = type(None) in get_args(each.type)
    if value is None and is_optional:
        return None
    return declared.kind.settle(each.name, value, is_optional=is_optional)


class TakesArguments(Protocol[P]):
    """Makes a constructor one that takes P."""

    def __call__(
        self, init: Callable[Concatenate[S, ...], None], /
    ) -> Callable[Concatenate[S, P], None]: ...


def takes_arguments_of(options: Callable[P, object]) -> TakesArguments[P]:
    """For a constructor that hands its keyword arguments to `options`: so it has their names, types
    and defaults for type checkers, `help` and `inspect.signature`."""

    def decorate(init: Callable[Concatenate[S, ...], None]) -> Callable[Concatenate[S, P], None]:
        own, *_ = inspect.signature(init).parameters.values()
        taken = inspect.signature(options)
        parameters = [own, *taken.parameters.values()]
        changed: Any = init
        changed.__signature__ = taken.replace(parameters=parameters)
        changed.options = options  # for docs/python.md
        return init

    return decorate


def served_defaults(options: type) -> dict[str, Any]:
    """Of options that have another default in `quire serve`: that default, by name."""
    return {
        each.name: declared.flag.served
        for each, declared in declared_options(options)
        if declared.flag.served is not _NOT_GIVEN
    }


def flag_name(each: Field[Any], declared: Option) -> str:
    """As "--max-num-seqs"."""
    return f"--{declared.flag.name or each.name.replace('_', '-')}"


def flag_words(options: type, given: Mapping[str, Any]) -> list[str]:
    """The words of a command line that give these values to options of these names, in the order
    in which they are declared."""
    words: list[str] = []
    for each, declared in declared_options(options):
        value, name = given.get(each.name), flag_name(each, declared)
        if value is None or declared.group is None:
            continue
        if isinstance(declared.kind, Switch):
            words.append(name if value else name.replace("--", "--no-", 1))
        elif isinstance(declared.kind, Texts):
            words += [word for text in value for word in (name, text)]
        elif isinstance(declared.kind, JsonObject) and not isinstance(value, str):
            words += [name, json.dumps(value)]
        else:
            words += [name, str(value)]
    return words


def flag_help(each: Field[Any], declared: Option) -> str:
    """The line of help: what it does, and the default in parentheses."""
    text = declared.help.replace("{names}", in_words(declared.kind.names()))
    shown, served = declared.flag.shown, declared.flag.served
    if shown is None:
        shown = _shown(each.default)
        if served is not _NOT_GIVEN:
            shown += f"; serve: {_shown(served)}"
    return f"{text} ({shown})" if shown else text


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    if isinstance(default, float):
        return f"{default:g}"
    return "" if default is None or default == () else str(default)


def in_words(names: Sequence[str]) -> str:
    """ "a, b or c"."""
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def token_count(text: str) -> int:
    """A number that may end in k, m or g (thousands), or in K, M or G (powers of 1024), as in vLLM:
    4k is 4000, 4K is 4096, 1.5k is 1500. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", text.strip())
    if found is None or ("." in found[1] and not found[2]):
        raise ValueError(f"{text!r} is no number; it may end in k or K, as 4k")
    base = 1000 if found[2].islower() else 1024
    count = Fraction(found[1]) * base ** " kmg".index(found[2].lower() or " ")
    if count.denominator != 1:
        raise ValueError(f"{text!r} is {float(count):g}, no whole number")
    return int(count)


def parse_bytes(name: str, value: Any) -> int:
    """2147483648, "2GiB", "500 MB" -> bytes. Raises ConfigurationError naming the option."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*", value)
        unit = _UNITS.get(found[2].lower(), 0) if found else 0
        if found and unit and not (unit == 1 and "." in found[1]):
            return int(Fraction(found[1]) * unit)
    raise ConfigurationError(
        f'{name} is {value!r:.80}, but must be a number of bytes or text like "2GiB" or "500MB"'
    )
