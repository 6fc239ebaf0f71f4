"""Options as fields of dataclasses: declared once, checked here.

    @dataclass(frozen=True)
    class StepOptions(Options):
        max_num_seqs: int = option(
            64, Whole(1), group="scheduling", help="sequences per step at most"
        )

Everything else about an option is made from such a field: command-line flags, keys of a YAML file,
arguments of `LLM(...)`, checks and the reference in docs/python.md. Each component
declares its options in a frozen dataclass, and `options.engine_options` joins them. Imports no slow
modules, because `quire --version` imports this module.
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
    """The values that an option accepts."""

    #: Placeholder for the value in the flag's help.
    metavar: ClassVar[str | None] = None
    #: The type of number that the flag is parsed as; None leaves it as text for `validate`.
    number: ClassVar[type[int] | type[float] | None] = None

    @abstractmethod
    def validate(self, name: str, value: Any, *, is_optional: bool) -> Any:
        """Check a value and convert it to the field's type.

        `is_optional` says that the option may be None, but `value` is never None. Raises
        ConfigurationError, which names the option, the value and the bound.
        """

    def names(self) -> tuple[str, ...]:
        """The accepted names; empty if the kind is not an enumeration."""
        return ()


@dataclass(frozen=True, slots=True)
class Switch(Kind):
    """True or False."""

    #: Whether the flag has no opposite (--no-...).
    is_one_way: bool = False

    def validate(self, name: str, value: Any, *, is_optional: bool) -> bool:
        if isinstance(value, bool):
            return value
        allowed = "True, False or None" if is_optional else "True or False"
        raise ConfigurationError(f"{name} is {value!r}, but must be {allowed}")


@dataclass(frozen=True, slots=True)
class Whole(Kind):
    """A whole number from `minimum` to `maximum`, where None means no bound."""

    minimum: int = 0
    maximum: int | None = None
    metavar: ClassVar[str | None] = "N"
    number: ClassVar[type[int] | type[float] | None] = int

    def validate(self, name: str, value: Any, *, is_optional: bool) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigurationError(f"{name} is {value!r}, but must be a whole number")
        if value < self.minimum:
            raise ConfigurationError(f"{name} is {value}, but must be at least {self.minimum}")
        if self.maximum is not None and value > self.maximum:
            raise ConfigurationError(f"{name} is {value}, but must be at most {self.maximum}")
        return value


class Tokens(Whole):
    """A number of tokens, which may be written as 4k. If the option may be None, "auto" and -1 mean
    None."""

    def validate(self, name: str, value: Any, *, is_optional: bool) -> Any:
        if is_optional and value in ("auto", -1):
            return None
        if isinstance(value, str):
            try:
                value = token_count(value)
            except ValueError as error:
                raise ConfigurationError(f"{name}: {error}") from error
        return Whole.validate(self, name, value, is_optional=is_optional)


@dataclass(frozen=True, slots=True)
class PowerOfTwo(Kind):
    """A power of two from `minimum` to `maximum`."""

    minimum: int
    maximum: int
    metavar: ClassVar[str | None] = "N"
    number: ClassVar[type[int] | type[float] | None] = int

    def validate(self, name: str, value: Any, *, is_optional: bool) -> int:
        number = Whole(self.minimum).validate(name, value, is_optional=is_optional)
        if number > self.maximum or number & (number - 1):
            raise ConfigurationError(
                f"{name} is {number}, but must be a power of two from {self.minimum} to"
                f" {self.maximum}"
            )
        return number


MOST_UNITS = 4096
"""The error for a number that is too small suggests a larger unit only below this number."""


@dataclass(frozen=True, slots=True)
class Bytes(Kind):
    """A size in bytes, or as text such as "2GiB"."""

    minimum: int = 1
    #: The unit to suggest if a number below `minimum` is given without one; empty to suggest none.
    usual_unit: str = ""
    metavar: ClassVar[str | None] = "SIZE"

    def validate(self, name: str, value: Any, *, is_optional: bool) -> int:
        size = parse_bytes(name, value)
        has_unit = isinstance(value, str) and not value.strip().isdecimal()
        if 0 < size < min(self.minimum, MOST_UNITS) and self.usual_unit and not has_unit:
            raise ConfigurationError(
                f"{name} is {value}, but must be at least {self.minimum} bytes; did you mean"
                f" {size}{self.usual_unit}?"
            )
        return Whole(self.minimum).validate(name, size, is_optional=is_optional)


@dataclass(frozen=True, slots=True)
class Share(Kind):
    """A share of a whole, above 0 and at most 1."""

    metavar: ClassVar[str | None] = "X"
    number: ClassVar[type[int] | type[float] | None] = float

    def validate(self, name: str, value: Any, *, is_optional: bool) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and 0 < value <= 1:
            return value  # type: ignore[no-any-return]
        raise ConfigurationError(f"{name} is {value!r}, but must be above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class Seconds(Kind):
    """A finite time above 0, in seconds."""

    metavar: ClassVar[str | None] = "S"
    number: ClassVar[type[int] | type[float] | None] = float

    def validate(self, name: str, value: Any, *, is_optional: bool) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigurationError(f"{name} is {value!r}, but must be a number of seconds")
        if not 0 < value < math.inf:
            raise ConfigurationError(f"{name} is {value:g}, but must be above 0")
        return value


@dataclass(frozen=True, slots=True)
class Text(Kind):
    """Any text."""

    #: Describes the text in errors. If `what` is given, empty text is refused.
    what: str = ""
    #: Whether a `pathlib.Path` is accepted as well.
    is_path: bool = False

    def validate(self, name: str, value: Any, *, is_optional: bool) -> str:
        if self.is_path and isinstance(value, os.PathLike):
            value = os.fspath(value)
        if isinstance(value, str) and (value or not self.what):
            return value
        raise ConfigurationError(f"{name} is {value!r:.80}, but must be {self.what or 'text'}")


@dataclass(frozen=True, slots=True)
class Pattern(Kind):
    """Text that matches the whole regular expression `pattern`."""

    pattern: str
    #: Describes the text in errors.
    what: str

    def validate(self, name: str, value: Any, *, is_optional: bool) -> str:
        if isinstance(value, str) and re.fullmatch(self.pattern, value):
            return value
        raise ConfigurationError(f"{name} is {value!r}, but must be {self.what}")


@dataclass(frozen=True, slots=True)
class OneOf(Kind):
    """One of a few names."""

    #: The names. A registry may get further ones later.
    choices: Collection[str]
    #: Pairs of an alias and the name that it means.
    others: tuple[tuple[str, str], ...] = ()
    #: Formats the names for errors.
    listed: Callable[[tuple[str, ...]], str] = str
    #: A sentence, without its period, that ends the error for an unknown name; empty for none.
    advice: str = ""
    metavar: ClassVar[str | None] = "NAME"

    def validate(self, name: str, value: Any, *, is_optional: bool) -> str:
        known = self.names()
        meant = dict(self.others).get(value, value) if isinstance(value, str) else value
        if isinstance(meant, str) and meant in known:
            return meant
        none = "None or " if is_optional else ""
        raise ConfigurationError(
            f"{name} is {value!r}, but must be {none}one of {self.listed(known)}"
            + (f"; {self.advice}" if self.advice else "")
        )

    def names(self) -> tuple[str, ...]:
        return tuple(self.choices)


@dataclass(frozen=True, slots=True)
class Texts(Kind):
    """Any number of texts, given by a repeatable flag."""

    #: Describes one of the texts in errors.
    what: str = "text"
    #: Whether a text may also be a JSON list of texts.
    reads_json: bool = False
    #: Whether the texts are hidden in tracebacks.
    is_secret: bool = False
    #: Whether a flag accepts several texts at once.
    is_list: bool = False

    def validate(self, name: str, value: Any, *, is_optional: bool) -> tuple[str, ...]:
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
    """A JSON object, as a mapping or as text."""

    metavar: ClassVar[str | None] = "JSON"

    def validate(self, name: str, value: Any, *, is_optional: bool) -> dict[str, Any]:
        try:
            found = json.loads(value) if isinstance(value, str) else value
        except json.JSONDecodeError:
            found = None
        if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
            raise ConfigurationError(f"{name} is {value!r:.80}, but must be an object in JSON")
        return dict(found)


@dataclass(frozen=True, slots=True)
class Flag:
    """The differences between an option's flag and the flag that its name and kind imply."""

    #: The flag's name without dashes in front; None derives it from the option's name.
    name: str | None = None
    #: Further flags for the option.
    others: tuple[str, ...] = ()
    #: Placeholder for the value in the help; None means the kind's metavar.
    metavar: str | None = None
    #: The default as the help prints it. None prints the default's value; "" prints no default.
    shown: str | None = None
    #: The default of `quire serve`, if it differs.
    served: Any = _NOT_GIVEN


@dataclass(frozen=True, slots=True)
class Option:
    """The declaration of an option, except its name, type and default; see `option`."""

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
    """Make a dataclass field that is an option. The field's type says whether None is allowed.

    `help` is a line for the command line, in which "{names}" stands for the kind's names. The
    reference prints `doc`, or `help` if there is no doc. `group` is the flag's group in the help;
    None means that the option has no flag.
    """
    declared = Option(kind, help, doc or help, group, flag or Flag())
    is_secret = isinstance(kind, Texts) and kind.is_secret
    return field(default=default, repr=not is_secret, metadata={_METADATA: declared})


class Options:
    """Base of the dataclasses whose fields are options.

    Invariant: the declaration of each option accepts its value, and `_check_together` accepts all
    values together.
    """

    def __post_init__(self) -> None:
        for each, declared in declared_options(type(self)):
            value = _validated(each, declared, getattr(self, each.name))
            object.__setattr__(self, each.name, value)  # the class is frozen
        self._check_together()

    def part(self, options: type["Options"]) -> dict[str, Any]:
        """The values of one component's options, by name."""
        return {each.name: getattr(self, each.name) for each, _ in declared_options(options)}

    def _check_together(self) -> None:
        """Check conditions between options; overrides call `super()`.

        Raises ConfigurationError.
        """


def declared_options(options: type) -> Iterator[tuple[Field[Any], Option]]:
    """The fields that are options, in the order of their declaration."""
    for each in fields(options):
        if _METADATA in each.metadata:
            yield each, each.metadata[_METADATA]


def check_each(options: type[Options], given: Mapping[str, Any]) -> None:
    """Check each value, without regard to other options. Raises ConfigurationError."""
    for each, declared in declared_options(options):
        if each.name in given:
            _validated(each, declared, given[each.name])


def _validated(each: Field[Any], declared: Option, value: Any) -> Any:
    is_optional = type(None) in get_args(each.type)
    if value is None and is_optional:
        return None
    return declared.kind.validate(each.name, value, is_optional=is_optional)


class TakesArguments(Protocol[P]):
    """A decorator that gives a constructor the parameters P."""

    def __call__(
        self, init: Callable[Concatenate[S, ...], None], /
    ) -> Callable[Concatenate[S, P], None]: ...


def takes_arguments_of(options: Callable[P, object]) -> TakesArguments[P]:
    """Decorate a constructor that passes its keyword arguments to `options`.

    Type checkers, `help` and `inspect.signature` then see the names, types and defaults of options.
    """

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
    """The defaults of `quire serve`, by name, for options whose default differs there."""
    return {
        each.name: declared.flag.served
        for each, declared in declared_options(options)
        if declared.flag.served is not _NOT_GIVEN
    }


def flag_name(each: Field[Any], declared: Option) -> str:
    """The option's flag, such as "--max-num-seqs"."""
    return f"--{declared.flag.name or each.name.replace('_', '-')}"


def flag_words(options: type, given: Mapping[str, Any]) -> list[str]:
    """The words of a command line that set options to the values in `given`, in the order in which
    the options are declared."""
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
    """The help line of the option, with the default in parentheses."""
    text = declared.help.replace("{names}", in_words(declared.kind.names()))
    shown, served = declared.flag.shown, declared.flag.served
    if shown is None:
        shown = _shown(each.default)
        if served is not _NOT_GIVEN:
            shown += f"{shown and '; '}serve: {_shown(served)}"
    return f"{text} ({shown})" if shown else text


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    if isinstance(default, float):
        return f"{default:g}"
    return "" if default is None or default == () else str(default)


def in_words(names: Sequence[str]) -> str:
    """Join names as in "a, b or c"."""
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def token_count(text: str) -> int:
    """Parse a number that may end in k, m or g (powers of 1000) or K, M or G (powers of 1024).

    As in vLLM, 4k is 4000, 4K is 4096, and 1.5k is 1500. Raises ValueError.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", text.strip())
    if found is None or ("." in found[1] and not found[2]):
        raise ValueError(f"{text!r} is no number; it may end in k or K, as 4k")
    base = 1000 if found[2].islower() else 1024
    count = Fraction(found[1]) * base ** " kmg".index(found[2].lower() or " ")
    if count.denominator != 1:
        raise ValueError(f"{text!r} is {float(count):g}, no whole number")
    return int(count)


def parse_bytes(name: str, value: Any) -> int:
    """Parse 2147483648, "2GiB" or "500 MB" to bytes.

    Raises ConfigurationError, which names the option.
    """
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
