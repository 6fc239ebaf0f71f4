"""Defers three modules that `import torch` runs and that an engine does not use.

They declare what operators do to tensors of the meta device and in torch.export. torch.compile,
torch.export and transformers' models use that. Running them takes a third of the time of
`import torch`. Used by `quick_start`, only in processes that quire starts itself and the command's
own.
"""

import importlib
import sys
import threading
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

TESTED = ("2.13.",)
"""Beginnings of the versions of torch with which this was tested. Others run all modules at once,
since a module may get another effect that torch relies on."""

DEFERRED = ("torch._meta_registrations", "torch.distributed._meta_registrations", "torch.export")
"""Modules that run later. torch binds them to names and reads none of their attributes."""

RUN_IN_PLACE = {"torch._meta_registrations": "torch._prims.rng_prims"}
"""Modules that a deferred module imports and that run at once, by the deferred module. Without
rng_prims there is no torch.Generator."""

USERS = ("torch._dynamo", "torch._inductor", "torch._export", "transformers")
"""Modules that need the deferred ones, which therefore run before these are imported."""


class DeferredImports(MetaPathFinder):
    """Finds the deferred modules for the import system, and imports them when they are needed.

    They are needed when an attribute of one is read, or when one of USERS or of torch.export's
    submodules is imported. Until then, each has an empty stand-in. Python imports them, with its
    own locks: with another lock, two threads that import could wait for each other for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: The modules that were imported and have stand-ins, in the order of their imports.
        self._stand_ins: dict[str, ModuleType] = {}
        self._is_over = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `MetaPathFinder`. None for modules that other finders find."""
        if self._is_over or not name.startswith(("torch.", "transformers")):
            return None
        if name in USERS or name.startswith("torch.export."):
            self.import_all()
            # A deferred module may have imported it. Python would run the module again by the
            # module's own spec while it is in sys.modules. The loader puts it back.
            module = sys.modules.pop(name, None)
            return None if module is None else ModuleSpec(name, _ImportedLoader(module))
        if name not in DEFERRED or not sys.modules["torch"].__version__.startswith(TESTED):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _DeferringLoader(self, spec.loader)
        return spec

    def stand_in(self, module: ModuleType) -> None:
        """Let an empty module stand for the module of its name until that is needed."""

        def read(name: str) -> Any:
            # Python and its tools look for such names in all modules.
            if name.startswith("__") and name != "__all__":
                raise AttributeError(name)
            self.import_all()
            return getattr(sys.modules[module.__name__], name)

        module.__dict__["__getattr__"] = read
        self._stand_ins[module.__name__] = module

    def import_all(self) -> None:
        """Import the modules that have stand-ins, and defer no others."""
        with self._lock:
            if not self._is_over:
                self._is_over = True
                for name in self._stand_ins:
                    del sys.modules[name]
        for name in self._stand_ins:
            importlib.import_module(name)


class _DeferringLoader(Loader):
    """Creates a module as another loader does, and does not run it."""

    def __init__(self, imports: DeferredImports, loader: Loader) -> None:
        self._imports, self._loader = imports, loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """See `Loader`."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """See `Loader`."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._imports.stand_in(module)
        if module.__name__ in RUN_IN_PLACE:
            importlib.import_module(RUN_IN_PLACE[module.__name__])


class _ImportedLoader(Loader):
    """Gives the import system a module that has run, so that it does not run again."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """See `Loader`."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """See `Loader`."""
        module.__spec__ = self._spec  # Python has replaced it


def defer_imports() -> None:
    """Defer the modules DEFERRED from now on, unless torch is imported or this was called
    before."""
    if "torch" in sys.modules or any(isinstance(each, DeferredImports) for each in sys.meta_path):
        return
    sys.meta_path.insert(0, DeferredImports())


def import_deferred() -> None:
    """Import what was deferred, and defer nothing from now on: for code that may compute shapes
    with tensors of the meta device."""
    for each in sys.meta_path:
        if isinstance(each, DeferredImports):
            each.import_all()
