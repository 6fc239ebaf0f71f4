"""Base class of parameter objects that check every assigned value and explain wrong names.

`SamplingParams` and `BeamSearchParams` derive from `CheckedFields` and define the parameters.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import wraps
from typing import Any, ClassVar, TypeVar

from quire.errors import InvalidRequestError, did_you_mean, shown

Kind = TypeVar("Kind", bound="type[CheckedFields]")


class CheckedFields:
    """Base of a dataclass with slots. Invariant: each field has a value that its check returned."""

    __slots__ = ()
    #: Field -> function that returns the checked value to store, or raises InvalidRequestError.
    checks: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}
    #: Alias (an accepted other name) -> field.
    aliases: ClassVar[Mapping[str, str]] = {}
    #: Alias -> function that converts the alias's value, unless it is None, to the field's value.
    makers: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}
    #: Parameter of another engine -> (values that quire accepts because they have no effect, error
    #: text for all other values, which names quire's alternative). None is always accepted.
    foreign: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        found = field_values(type(self), {name: value})
        for field_name, given in found.items():
            object.__setattr__(self, field_name, self.checks[field_name](given))

    def __getattr__(self, name: str) -> Any:
        """Called for a name that is not a field."""
        kind = type(self)
        if name in kind.aliases:
            return getattr(self, kind.aliases[name])
        why = did_you_mean(name, kind.checks)
        if name in kind.foreign:
            why = f": {kind.foreign[name][1]}"
        raise AttributeError(f"{kind.__name__} has no field {name}{why}", name=name, obj=self)


def field_values(kind: type[CheckedFields], given: Mapping[str, Any]) -> dict[str, Any]:
    """Translate given names to field names.

    Raises InvalidRequestError for an unknown name, and for a parameter of another engine with a
    value that quire does not support.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        target = kind.aliases.get(name, name)
        if name in kind.makers:
            if value is None:
                continue
            value = kind.makers[name](value)
        if target in kind.checks:
            if target in found:
                raise InvalidRequestError(f"{name} is given twice, also as {target}", name)
            found[target] = value
        elif name not in kind.foreign:
            raise InvalidRequestError(
                f"{kind.__name__} has no option {name}{did_you_mean(name, kind.checks)}", name
            )
        else:
            check_harmless(name, value, *kind.foreign[name])
    return found


def check_harmless(name: str, value: Any, harmless: tuple[Any, ...], why: str) -> None:
    """Raise InvalidRequestError unless the value is None or one of `harmless`."""
    # Compare types as well, because True == 1 in Python.
    if value is None or any(
        isinstance(value, bool) == isinstance(same, bool) and value == same for same in harmless
    ):
        return
    wanted = " or ".join(["left out", *map(repr, harmless)])
    raise InvalidRequestError(f"{name} is {shown(value)}, but must be {wanted}: {why}", name)


def answers_mistakes(kind: Kind) -> Kind:
    """Make the dataclass raise InvalidRequestError for wrong arguments, instead of TypeError."""
    made: Callable[..., None] = kind.__init__
    needed = [each.name for each in fields(kind) if each.default is MISSING]  # type: ignore[arg-type]

    @wraps(made)
    def init(self: CheckedFields, *unnamed: Any, **given: Any) -> None:
        if unnamed:
            raise InvalidRequestError(
                f"{kind.__name__} takes its options by name, as {kind.__name__}("
                f"{next(iter(kind.checks))}={shown(unnamed[0])})"
            )
        found = field_values(kind, given)
        for name in needed:
            if name not in found:
                raise InvalidRequestError(f"{kind.__name__} needs {name}", name)
        made(self, **found)

    type.__setattr__(kind, "__init__", init)
    return kind
