"""The packaging hook: compiles the native kernels into the wheel, where a C++ compiler is.

Without one the wheel is pure Python and torch computes; quire says so when an engine starts, and in
`quire --version -v`. Reads CXX, the compiler to take, and QUIRE_WHEEL_LIBRARY, a library that
scripts/release has compiled: the wheel gets that library, and its tag. Called by hatchling.
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
LIBRARY = "QUIRE_WHEEL_LIBRARY"
"""The environment variable that names a compiled library for a standard wheel."""


class NativeKernelsHook(BuildHookInterface[Any]):
    """A standard wheel gets a library of its own; an editable install has it beside the sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """version: "standard" or "editable", of a wheel."""
        build = _load(Path(self.root), KERNELS / "build.py")
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        compiled = os.environ.get(LIBRARY)
        if version == "editable":
            if not build.is_current(build.LIBRARY):  # else scripts/lib.sh has built it
                self._compile(build, build.LIBRARY, Path(self.root, OBJECTS))
        elif compiled is not None:
            self._add(build, Path(compiled), self._tag_of(build, Path(compiled)), build_data)
        else:
            self._scratch = tempfile.TemporaryDirectory()
            library = Path(self._scratch.name, build.LIBRARY.name)
            if self._compile(build, library, None):
                # For this machine alone: it may need libraries of the compiler's version.
                platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
                self._add(build, library, f"py3-none-{platform}", build_data)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """The wheel is written."""
        if self._scratch is not None:
            self._scratch.cleanup()

    def _compile(self, build: ModuleType, library: Path, objects: Path | None) -> bool:
        """Returns whether the library was built, and warns if it was not."""
        try:
            build.build(library, objects, os.environ.get("CXX"))
        except build.BuildError as error:
            self.app.display_warning(
                f"the native kernels were not built; torch will compute, which is slower: {error}"
            )
            return False
        return True

    def _tag_of(self, build: ModuleType, library: Path) -> str:
        """The tag of a library that was compiled before. Raises ValueError if it was compiled from
        other sources, and TagError if no tag is right."""
        tags = _load(Path(self.root), Path("tools", "wheel_tag.py"))
        elf = tags.read_elf(library)
        digest = build.source_digest(machine=elf.machine)
        if digest.encode() not in library.read_bytes():
            raise ValueError(
                f"{LIBRARY} is {library}, which was not compiled from these sources ({digest}) for"
                f" {elf.machine}; run scripts/release"
            )
        tag: str = tags.wheel_tag(elf)
        return tag

    def _add(self, build: ModuleType, library: Path, tag: str, build_data: dict[str, Any]) -> None:
        installed = KERNELS.relative_to("src") / build.LIBRARY.name
        build_data["force_include"][str(library)] = installed.as_posix()
        build_data["pure_python"] = False
        build_data["tag"] = tag


def _load(root: Path, path: Path) -> ModuleType:
    """A module of this source tree; by its path, since quire is not installed yet."""
    name = f"quire_packaging_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, root / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
