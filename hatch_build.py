"""The packaging hook: compiles the native kernels into the wheel, where a C++ compiler is.

Without one the wheel is pure Python and torch computes; quire says so when an engine starts, and in
`quire --version -v`. Reads CXX, the compiler to take; called by hatchling.
"""

import importlib.util
import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path("src", "quire", "kernels", "cpu")
OBJECTS = "build/native"
"""Where an editable install keeps object files, for the next build (scripts/build)."""


class NativeKernelsHook(BuildHookInterface[Any]):
    """A standard wheel gets a library of its own; an editable install has it beside the sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """version: "standard" or "editable", of a wheel."""
        build = _load_build(Path(self.root))
        is_editable = version == "editable"
        library: Path = build.LIBRARY
        if is_editable and build.is_current(library):
            return  # scripts/lib.sh has built it, perhaps for one instruction set
        if not is_editable:
            self._scratch = tempfile.TemporaryDirectory()
            library = Path(self._scratch.name, library.name)
        try:
            objects = Path(self.root, OBJECTS) if is_editable else None
            build.build(library, objects, os.environ.get("CXX"))
        except build.BuildError as error:
            self.app.display_warning(
                f"the native kernels were not built; torch will compute, which is slower: {error}"
            )
            return
        if is_editable:
            return
        installed = KERNELS.relative_to("src") / library.name
        build_data["force_include"][str(library)] = installed.as_posix()
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """The wheel is written."""
        if version != "editable":
            self._scratch.cleanup()


def _load_build(root: Path) -> ModuleType:
    """The module that compiles; by its path, since quire is not installed yet."""
    name = "quire_native_build"
    spec = importlib.util.spec_from_file_location(name, root / KERNELS / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
