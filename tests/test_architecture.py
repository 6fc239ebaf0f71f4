"""The floors of DESIGN.md, as a table, and the imports that they allow.

Reads the source as text and imports none of it. Each rule is a function from a tree of sources to
sentences of the form `file:line: what is wrong`; the second half of this file shows each rule a
small tree that breaks it.
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "quire"

ARROWS = {
    "cli": "server cluster simulation bench",
    "bench": "offline",
    "simulation": "engine",
    "server": "engine_client",
    "cluster": "engine_client",
    "offline": "assembly",
    "assembly": "engine_client engine runtime",
    "engine_client": "text core ipc",
    "engine": "core",
    "options": "attention core",
    "runtime": "speculation sampling core ipc",
    "speculation": "models",
    "models": "layers hub",
    "layers": "attention distributed formats",
    "attention": "formats",
    "formats": "kernels",
    "distributed": "kernels",
    "sampling": "kernels",
    "text": "hub",
    "kernels": "",
    "core": "",
    "hub": "",
    "ipc": "",
    "observability": "",
    "errors": "",
    "version": "",
    "quire": "offline engine_client core version",
}
"""Left may import right, and what right may import. A folder is an area; so is a file in `quire/`.
`__main__.py` belongs to `cli`; `quire` is the package's own `__init__.py`, which nobody imports.
Everybody may import errors; everybody but core, errors and version observability.
"""

CORE_CONTRACTS = ("sampling_params", "step", "request", "kv_groups")
"""Plain data of core, which text, models, layers and sampling may import as well."""
CONTRACT_READERS = ("text", "models", "layers", "attention", "speculation", "sampling")

NEEDS_EXTRA = {"httptools_protocol": "httptools"}
"""Modules of the front, by their last name, that load only where another package is installed."""

OPTION_FIELDS = "quire.options.fields"
"""How an option is declared: every component with options imports it, as it does errors."""
OPTION_READERS = ("cli", "server", "bench", "offline", "assembly", "options")
"""Areas that may read all of an engine's options together."""

NOT_IN_CORE = {
    "asyncio", "concurrent", "datetime", "io", "multiprocessing", "os", "pathlib", "queue",
    "random", "secrets", "select", "selectors", "shutil", "signal", "socket", "subprocess", "sys",
    "tempfile", "threading", "time", "uuid", "_thread",
}  # fmt: skip
"""Standard modules with a clock, threads, chance or the outer world in them."""

TORCH_FREE = ("server", "cluster", "engine_client", "text", "hub")
"""Areas that never import torch."""
STARTS_WITHOUT_TORCH = ("cli",)
"""Areas that may import torch in a function, for a command that needs it."""
BRINGS_TORCH = ("torch", "safetensors.torch", "transformers", "accelerate", "triton")

ASYNC_AREAS = ("server", "engine_client", "cluster", "bench", "cli")

ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
ENVIRONMENT_READER = "quire.cli.main"


@dataclass(frozen=True)
class Import:
    """One imported module. where: "module", "function" or "typing" (under TYPE_CHECKING)."""

    target: str
    line: int
    where: str


class Tree:
    """Sources by path below `src/quire`, and what each imports."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.sources = {_module_name(path): source for path, source in sources.items()}
        self.paths = {_module_name(path): path for path in sources}
        self.syntax = {name: ast.parse(source) for name, source in self.sources.items()}
        self.imports = {name: list(self._imports(name)) for name in self.sources}

    def at(self, module: str, line: int) -> str:
        """`file:line`, to click on."""
        return f"src/quire/{self.paths[module]}:{line}"

    def inner_imports(self, module: str) -> list[Import]:
        """The imports of our own modules."""
        return [entry for entry in self.imports[module] if entry.target.split(".")[0] == "quire"]

    def _imports(self, module: str) -> Iterator[Import]:
        for node, where in _walk(self.syntax[module].body, "module"):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(alias.name, node.lineno, where)
            else:
                base = self._base(module, node)
                for alias in node.names:
                    name = f"{base}.{alias.name}"
                    is_module = name in self.sources or (base, alias.name) == (
                        "safetensors",
                        "torch",
                    )
                    yield Import(name if is_module else base, node.lineno, where)

    def _base(self, module: str, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        is_package = self.paths[module].endswith("__init__.py")
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, node.module] if node.module else parts)


def _module_name(path: str) -> str:
    parts = ["quire", *path.removesuffix(".py").split("/")]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _walk(nodes: list[ast.stmt], where: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, where
        inside = where
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inside = "function"
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            inside = "typing"
        for _, value in ast.iter_fields(node):
            if isinstance(value, list):
                blocks = [item for item in value if isinstance(item, ast.stmt)]
                yield from _walk(blocks, inside)
                for item in value:
                    if isinstance(item, (ast.ExceptHandler, ast.match_case)):
                        yield from _walk(item.body, inside)


def area(module: str) -> str:
    """The name in ARROWS that a module belongs to."""
    name = module.split(".")[1] if "." in module else "quire"
    return "cli" if name == "__main__" else name


def _reachable(start: str) -> set[str]:
    found = {start}
    for right in ARROWS[start].split():
        found |= _reachable(right)
    return found


def may_import(module: str, target: str) -> bool:
    """Whether the floors allow it; `options` and the package itself have rules of their own."""
    left, right = area(module), area(target)
    if right in ("quire", "options"):
        return right == "options" and left not in ("errors", "version")
    if right == "errors" or right in _reachable(left):
        return True
    if right == "observability":
        return left not in ("core", "errors", "version")
    if right == "version":
        return left not in ("core", "errors")
    is_contract = target.removeprefix("quire.core.") in CORE_CONTRACTS
    return right == "core" and is_contract and left in CONTRACT_READERS


def unknown_areas(tree: Tree) -> list[str]:
    return [
        f"{tree.at(module, 1)}: {area(module)!r} has no floor; give it one in ARROWS"
        for module in tree.sources
        if area(module) not in ARROWS
    ]


def upward_imports(tree: Tree) -> list[str]:
    return [
        f"{tree.at(module, entry.line)}: {module} may not import {entry.target}"
        + (" (for types either)" if entry.where == "typing" else "")
        for module in tree.sources
        for entry in tree.inner_imports(module)
        if not may_import(module, entry.target)
    ]


def option_readers(tree: Tree) -> list[str]:
    return [
        f"{tree.at(module, entry.line)}: {module} may not read all options; declare those that"
        " it needs in a small dataclass beside it"
        for module in tree.sources
        for entry in tree.inner_imports(module)
        if area(entry.target) == "options" and entry.target != OPTION_FIELDS
        if area(module) not in OPTION_READERS
    ]


def cycles(tree: Tree) -> list[str]:
    """Cycles between files, through imports of any kind."""
    found: list[str] = []
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append(f"{tree.at(module, 1)}: cycle: {' -> '.join([*path, module])}")
            return
        if module in done or module not in tree.sources:
            return
        for target in {entry.target for entry in tree.inner_imports(module)}:
            visit(target, [*path, module])
        done.add(module)

    for module in tree.sources:
        visit(module, [])
    return found


def silent_function_imports(tree: Tree) -> list[str]:
    """Imports in a function with no comment on their line, above it, or above their run."""
    found = []
    for module, source in tree.sources.items():
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        explained = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
        for entry in tree.imports[module]:
            if entry.where != "function":
                continue
            if {entry.line, entry.line - 1} & explained:
                explained.add(entry.line)
            else:
                found.append(
                    f"{tree.at(module, entry.line)}: {entry.target} is imported inside a function"
                    " without a comment that says why"
                )
    return found


def impure_core(tree: Tree) -> list[str]:
    found = []
    for module in tree.sources:
        if area(module) != "core":
            continue
        for entry in tree.imports[module]:
            root = entry.target.split(".")[0]
            if root in NOT_IN_CORE or root not in {"quire", *sys.stdlib_module_names}:
                found.append(f"{tree.at(module, entry.line)}: core may not import {entry.target}")
    return found


def _loaded_by(tree: Tree, module: str) -> Iterator[str]:
    """What importing a module loads of ours: itself, what it names, the packages around them."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in seen or name not in tree.sources:
            continue
        seen.add(name)
        yield name
        waiting.append(name.rpartition(".")[0])
        waiting += [entry.target for entry in tree.imports[name] if entry.where == "module"]


def torch_where_none_may_be(tree: Tree) -> list[str]:
    found = []
    for module in tree.sources:
        if area(module) not in TORCH_FREE + STARTS_WITHOUT_TORCH:
            continue
        direct = [
            entry
            for entry in tree.imports[module]
            if entry.where != "module" and area(module) in TORCH_FREE
        ]
        for name in _loaded_by(tree, module):
            entries = [entry for entry in tree.imports[name] if entry.where == "module"]
            for entry in entries + (direct if name == module else []):
                if any(f"{entry.target}.".startswith(f"{root}.") for root in BRINGS_TORCH):
                    found.append(
                        f"{tree.at(name, entry.line)}: {entry.target} reaches {module},"
                        " which is to load without torch"
                    )
    return found


def asyncio_outside(tree: Tree) -> list[str]:
    return [
        f"{tree.at(module, entry.line)}: asyncio belongs into {', '.join(ASYNC_AREAS)}"
        for module in tree.sources
        for entry in tree.imports[module]
        if entry.target.split(".")[0] == "asyncio" and area(module) not in ASYNC_AREAS
    ]


def environment_readers(tree: Tree) -> list[str]:
    found = []
    for module, syntax in tree.syntax.items():
        if module == ENVIRONMENT_READER:
            continue
        for node in ast.walk(syntax):
            by_attribute = isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT
            by_name = isinstance(node, ast.ImportFrom) and node.module == "os"
            if by_name and isinstance(node, ast.ImportFrom):
                by_name = bool(ENVIRONMENT & {alias.name for alias in node.names})
            if by_attribute or by_name:
                where = tree.at(module, node.lineno)
                found.append(f"{where}: only {ENVIRONMENT_READER} reads the environment")
    return found


RULES: tuple[Callable[[Tree], list[str]], ...] = (
    unknown_areas,
    upward_imports,
    option_readers,
    cycles,
    silent_function_imports,
    impure_core,
    torch_where_none_may_be,
    asyncio_outside,
    environment_readers,
)


@pytest.fixture(scope="module")
def quire_tree() -> Tree:
    return Tree({path.relative_to(SRC).as_posix(): path.read_text() for path in SRC.rglob("*.py")})


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(rule: Callable[[Tree], list[str]], quire_tree: Tree) -> None:
    found = rule(quire_tree)
    assert not found, "\n" + "\n".join(found)


def test_the_front_loads_without_torch(quire_tree: Tree) -> None:
    """The rule above reads the source; this one asks Python, other people's packages included."""
    front = [
        name
        for name in quire_tree.sources
        if area(name) in TORCH_FREE + STARTS_WITHOUT_TORCH
        and name != "quire.__main__"
        and find_spec(NEEDS_EXTRA.get(name.rpartition(".")[2], "quire"))
    ]
    lines = [f"import {name}" for name in front]
    code = "\n".join([*lines, "import sys; sys.exit('torch' in sys.modules)"])
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_floors_have_no_cycle_and_only_known_names() -> None:
    for name, rights in ARROWS.items():
        assert set(rights.split()) <= set(ARROWS)
        assert all(name not in _reachable(right) for right in rights.split())


BROKEN = [
    (unknown_areas, {"newfloor/x.py": ""}, "newfloor/x.py:1: 'newfloor' has no floor"),
    (
        upward_imports,
        {"models/families/llama.py": "import math\nimport quire.runtime\n"},
        "models/families/llama.py:2: quire.models.families.llama may not import quire.runtime",
    ),
    (
        upward_imports,
        {"core/x.py": "from quire.observability.log import get_logger"},
        "core/x.py:1",
    ),
    (
        upward_imports,
        {"core/x.py": "from ..offline import llm", "offline/llm.py": ""},
        "core/x.py:1",
    ),
    (upward_imports, {"server/app.py": "from quire.bench.load import run"}, "server/app.py:1"),
    (upward_imports, {"engine/x.py": "from quire import LLM", "__init__.py": ""}, "engine/x.py:1"),
    (
        upward_imports,
        {"models/x.py": "from quire.core.scheduling.scheduler import Scheduler"},
        "models/x.py:1",
    ),
    (upward_imports, {"text/x.py": "import quire.models.families.llama"}, "text/x.py:1"),
    (
        upward_imports,
        {"core/x.py": "if TYPE_CHECKING:\n    from quire.offline.llm import LLM\n"},
        "core/x.py:2: quire.core.x may not import quire.offline.llm (for types either)",
    ),
    (
        upward_imports,
        {"core/x.py": "try:\n    pass\nexcept E:\n    import quire.offline.llm"},
        "core/x.py:4",
    ),
    (option_readers, {"engine/x.py": "from quire.options.x import X"}, "engine/x.py:1"),
    (
        option_readers,
        {"runtime/x.py": "from quire.options import x", "options/x.py": ""},
        "runtime/x.py:1",
    ),
    (
        cycles,
        {"core/a.py": "import quire.core.b", "core/b.py": "from quire.core import a"},
        "quire.core.a -> quire.core.b -> quire.core.a",
    ),
    (
        cycles,
        {"core/a.py": "from .b import f", "core/b.py": "def f():\n    from .a import g"},
        "quire.core.a -> quire.core.b -> quire.core.a",
    ),
    (silent_function_imports, {"text/x.py": "def f():\n    import json\n"}, "text/x.py:2: json"),
    (
        silent_function_imports,
        {"text/x.py": "def f():\n    # why\n    x = 1\n    import json\n"},
        "text/x.py:4",
    ),
    (impure_core, {"core/x.py": "import torch"}, "core/x.py:1: core may not import torch"),
    (impure_core, {"core/x.py": "from time import monotonic"}, "core/x.py:1"),
    (impure_core, {"core/x.py": "import os.path"}, "core/x.py:1"),
    (impure_core, {"core/x.py": "def f():\n    import threading"}, "core/x.py:2"),
    (
        torch_where_none_may_be,
        {"server/x.py": "def f():\n    import torch"},
        "server/x.py:2: torch",
    ),
    (
        torch_where_none_may_be,
        {"engine_client/inputs.py": "import torch.nn"},
        "engine_client/inputs.py:1",
    ),
    (torch_where_none_may_be, {"text/x.py": "from safetensors import torch"}, "text/x.py:1"),
    (
        torch_where_none_may_be,
        {
            "server/x.py": "from quire.core import y",
            "core/y.py": "from quire.core.z import f",
            "core/z.py": "import transformers.models",
        },
        "core/z.py:1: transformers.models reaches quire.server.x",
    ),
    (
        torch_where_none_may_be,
        {"text/x.py": "", "text/__init__.py": "import torch"},
        "text/__init__.py:1: torch reaches quire.text.x",
    ),
    (torch_where_none_may_be, {"cli/x.py": "import torch"}, "cli/x.py:1: torch"),
    (asyncio_outside, {"engine/engine.py": "from asyncio import Queue"}, "engine/engine.py:1"),
    (environment_readers, {"runtime/x.py": "import os\nos.environ['A'] = '1'"}, "runtime/x.py:2"),
    (environment_readers, {"runtime/x.py": "from os import getenv"}, "runtime/x.py:1"),
    (environment_readers, {"cli/chat.py": "import os\nos.getenv('A')"}, "cli/chat.py:2"),
]


@pytest.mark.parametrize(("rule", "sources", "expected"), BROKEN)
def test_a_rule_catches_what_breaks_it(
    rule: Callable[[Tree], list[str]], sources: dict[str, str], expected: str
) -> None:
    found = "\n".join(rule(Tree(sources)))
    assert expected in found


FINE = {
    "__init__.py": "from quire.version import __version__\n"
    "if TYPE_CHECKING:\n    from quire.offline.llm import LLM\n",
    "version.py": "",
    "options/x.py": "from quire.core.scheduling.scheduler import Scheduler",
    "core/options.py": "from quire.options.fields import option",
    "errors.py": "",
    "cli/main.py": "import os\nos.environ\nfrom quire.options.x import X\n"
    "def f():\n    # heavy\n    import torch\n    import json\n    import time  # too",
    "cli/chat.py": "from quire.errors import QuireError",
    "core/step.py": "from quire.errors import QuireError\nimport hashlib",
    "core/scheduling/scheduler.py": "from quire.core.step import StepPlan",
    "models/__init__.py": "",
    "models/families/llama.py": "import torch\nfrom quire.kernels.norm import norm\n"
    "from quire.core.step import StepPlan",
    "kernels/norm.py": "import torch\nfrom quire.observability.log import get_logger",
    "observability/log.py": "import logging",
    "runtime/batch.py": "from quire.models import llama\nfrom quire.core.x import S",
    "offline/llm.py": "from quire.runtime.batch import StepBatch\nfrom quire.options.x import X",
    "engine_client/async_engine.py": "import asyncio\ndef f():\n    # it\n    import quire.text.x",
    "server/app.py": "import asyncio\nfrom quire.engine_client.async_engine import AsyncEngine",
    "server/launch.py": "from quire.options.x import X",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_lets_a_sound_tree_pass(rule: Callable[[Tree], list[str]]) -> None:
    assert rule(Tree(FINE)) == []
