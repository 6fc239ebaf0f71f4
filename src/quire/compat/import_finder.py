"""Answers imports of what is not in the package.

Python asks this finder last, for what no other has found: a module below `quire`, or, since a
package's names may be modules, a name that a package lacks.

    from quire.sampling_params import SamplingParams    vLLM's module: one of aliases, made here
    from quire.platforms import current_platform        ModuleNotFoundError: what to use instead
    from quire import SamplingParam                     the same, with the nearest name

Knows no names; `vllm_names` has them. Installed by the package itself.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

from quire.compat.vllm_names import ADVICE, NAMES
from quire.errors import did_you_mean


class ImportFinder:
    """A finder and loader of importlib's."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raises ModuleNotFoundError for what is below `quire`, but neither there nor known."""
        if not name.startswith("quire."):
            return None
        if name in NAMES:
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        parent, _, own = name.rpartition(".")
        home = NAMES.get(parent, {}).get(own)
        if home is not None:
            # A module of ours that lacks the name gets it; that it is no module, the import goes
            # over, as its message is about the very name.
            setattr(sys.modules[parent], own, _object(home, own))
            raise ModuleNotFoundError(f"{name} is no module", name=name)
        raise ModuleNotFoundError(_sentence(parent, own))

    def create_module(self, spec: ModuleSpec) -> None:
        """The usual kind."""

    def exec_module(self, module: ModuleType) -> None:
        """Fill a module of aliases."""
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
    """The longest first."""
    while "." in name:
        yield name
        name = name.rpartition(".")[0]


def _below(parent: str) -> set[str]:
    """Names of the modules of aliases in one."""
    start = f"{parent}."
    return {name.removeprefix(start).split(".")[0] for name in NAMES if name.startswith(start)}
