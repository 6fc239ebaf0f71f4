"""Registries: the names that options and files may choose, with what they stand for.

Each seam (scheduling policies, weight formats, HTTP endpoints and others) has one `Registry` in its
own package; docs/extending.md lists them. quire's own entries are given when the registry is made.
Plugins and programs add theirs with `register`. An entry may be the text "module:attribute": it is
imported when it is first needed, so a registry can be filled without what its entries import.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar

from quire.errors import ConfigurationError, did_you_mean

T = TypeVar("T")
M = TypeVar("M")


class Registry(Generic[T]):
    """Objects of one kind by name: quire's own first, then others as they were registered.

    Invariant: all entries with one name come from one module.
    """

    def __init__(
        self,
        kind: str,
        own: Mapping[str, T | str] | Callable[[], Mapping[str, T | str]],
        reserved: Mapping[str, str] | None = None,
    ) -> None:
        """`kind` is what errors call an entry, such as "scheduling policy". `own` are quire's
        entries, or a function that returns them, which is called when they are first needed.
        `reserved` maps names that entries may not take to the things of these names, such as "a
        dtype"."""
        self._kind = kind
        self._reserved = reserved or {}
        self._entries: dict[str, T | str] = {}
        #: The module that registered each entry; "quire" for quire's own.
        self._origins: dict[str, str] = {}
        #: The function that returns quire's own entries; None once they are among the others.
        self._own: Callable[[], Mapping[str, T | str]] | None = None
        if callable(own):
            self._own = own
        else:
            self._add_own(own)

    def register(self, name: str, value: T | str) -> None:
        """Add an entry in this process. The module that registered a name may replace its entry, as
        when a cell of a notebook runs again.

        Raises ConfigurationError if another module or quire itself has registered the name, and for
        a reserved name.
        """
        origin = str(sys._getframe(1).f_globals.get("__name__"))
        if name in self._reserved:
            raise ConfigurationError(
                f"{self._kind} {name!r} is registered by {origin}, but {self._reserved[name]} has"
                " this name; give it another name"
            )
        if self._origins.setdefault(name, origin) != origin:
            raise self._clash(name, self._origins[name], origin)
        self._entries[name] = value

    def get(self, name: str) -> T:
        """The entry with this name, imported if need be. Raises ConfigurationError, with the known
        names, for an unknown name, and for an entry that can't be imported."""
        entries = self._filled()
        if name not in entries:
            raise ConfigurationError(
                f"{self._kind} is {name!r}, but must be one of {', '.join(entries)}"
                f"{did_you_mean(name, entries)}"
            )
        value = entries[name]
        if isinstance(value, str):
            value = entries[name] = imported(value)
        return value

    def make(
        self: "Registry[Callable[..., M]]", name: str, options: Mapping[str, float] | None = None
    ) -> M:
        """A new object from the factory with this name, such as a policy's class.

        `options` are keyword arguments of the factory. Raises ConfigurationError, with the known
        names, for an unknown name or option.
        """
        factory = self.get(name)
        known = inspect.signature(factory).parameters
        for option in options or {}:
            if option not in known:
                raise ConfigurationError(
                    f"{self._kind} {name!r} has no option {option!r}; its options:"
                    f" {', '.join(known) or 'none'}"
                )
        return factory(**(options or {}))

    def items(self) -> list[tuple[str, T]]:
        """All entries with their names, imported if need be."""
        return [(name, self.get(name)) for name in self]

    def __contains__(self, name: object) -> bool:
        return name in self._filled()

    def __iter__(self) -> Iterator[str]:
        return iter(self._filled())

    def __len__(self) -> int:
        return len(self._filled())

    def _filled(self) -> dict[str, T | str]:
        """All entries. Raises ConfigurationError if a name of quire's own was registered before."""
        own = self._own  # a local, since another thread may be adding them, too
        if own is not None:
            self._add_own(own())
            self._own = None
        return self._entries

    def _add_own(self, own: Mapping[str, T | str]) -> None:
        for name in own:
            if (origin := self._origins.get(name, "quire")) != "quire":
                raise self._clash(name, "quire", origin)
        self._entries = {**own, **self._entries}
        self._origins |= dict.fromkeys(own, "quire")

    def _clash(self, name: str, first: str, second: str) -> ConfigurationError:
        return ConfigurationError(
            f"{self._kind} {name!r} is registered by {first} and by {second}; give one of them"
            " another name"
        )


def imported(path: str) -> Any:
    """The object "module:attribute". Raises ConfigurationError if it can't be imported."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"{path} can't be imported: {error}") from error
