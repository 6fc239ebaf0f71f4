"""Handles imports of modules and names that the package `quire` lacks.

Python asks this finder last, for a module below `quire` that no other finder has found. Python also
asks for a name that a package lacks, since the name may be a module.

    from quire.sampling_params import SamplingParams    vLLM's module: aliases in a module made here
    from quire.platforms import current_platform        ModuleNotFoundError with the alternative
    from quire import SamplingParam                     ModuleNotFoundError with the nearest name

The names are in `vllm_names`. Installed by the package itself.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

from quire.compat.vllm_names import ADVICE, NAMES
from quire.errors import did_you_mean


class ImportFinder:
    """A finder and loader for importlib."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raises ModuleNotFoundError for an unknown name below `quire`."""
        if not name.startswith("quire."):
            return None
        if name in NAMES:
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        parent, _, own = name.rpartition(".")
        home = NAMES.get(parent, {}).get(own)
        if home is not None:
            # Add the name to quire's module, and raise the error that the name is no module. The
            # import statement ignores that error, and then finds the attribute.
            setattr(sys.modules[parent], own, _object(home, own))
            raise ModuleNotFoundError(f"{name} is no module", name=name)
        raise ModuleNotFoundError(_sentence(parent, own))

    def create_module(self, spec: ModuleSpec) -> None:
        """Let importlib make an ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        """Set the aliases of a module."""
        for own, home in NAMES[module.__name__].items():
            setattr(module, own, _object(home, own))


def _object(home: str, own: str) -> object:
    module, _, other = home.partition(":")
    return getattr(import_module(module), other or own)


def _sentence(parent: str, own: str) -> str:
    where = f"{parent}.{own}"
    known: Mapping[str, str] = ADVICE
    for name in (own, *_prefixes(where)):
        if name in known:
            return f"{where} is not there: {known[name]}"
    names = [each for each in dir(sys.modules[parent]) if not each.startswith("_")]
    return f"there is no {own} in {parent}{did_you_mean(own, {*names, *_below(parent)})}"


def _prefixes(name: str) -> Iterable[str]:
    """For "a.b.c", yields "a.b.c" and "a.b": the dotted prefixes, longest first."""
    while "." in name:
        yield name
        name = name.rpartition(".")[0]


def _below(parent: str) -> set[str]:
    """Names of the alias modules directly inside `parent`."""
    start = f"{parent}."
    return {name.removeprefix(start).split(".")[0] for name in NAMES if name.startswith(start)}
