"""The floors of DESIGN.md, as a table, and the imports that they allow.

Reads the source as text and imports none of it. Each rule is a function from a tree of sources to
sentences of the form `file:line: what is wrong`; `test_architecture_rules` shows each rule a small
tree that breaks it.
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.source_tree import Tree

SRC = Path(__file__).parent.parent / "src" / "quire"

ARROWS = {
    "cli": "server cluster simulation planning replay plugins quick_start",
    "replay": "planning traces",
    "planning": "bench simulation traces",
    "bench": "offline measurement_file plugins",
    "simulation": "engine routing traces plugins tiers",
    "server": "engine_client traces cluster speculation",
    "cluster": "engine_client routing numa",
    "offline": "assembly",
    "engine_process": "assembly quick_start",
    "assembly": "engine_client engine runtime tiers numa speculation measurement_file",
    "engine_client": "text images core ipc child_process",
    "engine": "core",
    "routing": "core",
    "options": "attention images core tiers numa speculation plugins",
    "runtime": "models sampling core ipc child_process adapters",
    "adapters": "models core",
    "models": "layers hub",
    "layers": "attention recurrence distributed formats",
    "attention": "formats",
    "recurrence": "formats",
    "formats": "kernels",
    "tiers": "core kernels ipc",
    "distributed": "kernels",
    "sampling": "kernels",
    "speculation": "core",
    "traces": "",
    "text": "hub",
    "images": "core hub",
    "kernels": "",
    "core": "compat",
    "compat": "",
    "hub": "",
    "numa": "",
    "ipc": "",
    "measurement_file": "",
    "child_process": "",
    "observability": "",
    "plugins": "deferred_imports",
    "quick_start": "deferred_imports",
    "deferred_imports": "",
    "registry": "",
    "option_fields": "",
    "errors": "",
    "version": "",
    "quire": "offline engine_client cli core version compat",
}
"""Left may import right, and what right may import. A folder is an area; so is a file in `quire/`.
`__main__.py` belongs to `cli`; `quire` is the package's own `__init__.py`, which nobody imports.
Everybody may import errors, how options are declared (option_fields) and registry; everybody but
core, option_fields, registry, errors and version observability.
"""

CORE_CONTRACTS = (
    "sampling_params",
    "structured_outputs",
    "pooling",
    "step",
    "request",
    "kv_groups",
)
"""Plain data of core, which text, models, layers and sampling may import as well."""
CONTRACT_READERS = ("text", "models", "layers", "attention", "sampling")

NEEDS_EXTRA = {"httptools_protocol": "httptools"}
"""Modules of the API server, by their last name, that load only where another package is
installed."""

OPTION_READERS = (
    "cli",
    "server",
    "bench",
    "planning",
    "offline",
    "engine_client",
    "assembly",
    "options",
)
"""Areas that may read all of an engine's options together."""

NOT_IN_CORE = {
    "asyncio", "concurrent", "datetime", "io", "multiprocessing", "os", "pathlib", "queue",
    "random", "secrets", "select", "selectors", "shutil", "signal", "socket", "subprocess", "sys",
    "tempfile", "threading", "time", "uuid", "_thread",
}  # fmt: skip
"""Standard modules with a clock, threads, chance or the outer world in them."""

TORCH_FREE = ("server", "cluster", "engine_client", "text", "images", "hub", "traces")
"""Areas that never import torch."""
STARTS_WITHOUT_TORCH = ("cli",)
"""Areas that may import torch in a function, for a command that needs it."""
BRINGS_TORCH = ("torch", "safetensors.torch", "transformers", "accelerate", "triton")

ASYNC_AREAS = ("server", "engine_client", "cluster", "replay", "bench", "cli")

MAX_FILES = 25
"""In one folder, `__init__.py` not counted."""

ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
ENVIRONMENT_READER = "quire.cli.main"


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
    if right in ("option_fields", "registry"):
        return left not in ("errors", "version", "option_fields", "registry")
    if right == "observability":
        return left not in ("core", "option_fields", "registry", "errors", "version")
    if right == "version":
        return left not in ("core", "option_fields", "registry", "errors")
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
        if area(entry.target) == "options"
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
        inside = [entry for entry in tree.imports[module] if entry.where == "function"]
        if not inside:  # most files, which need not be split into tokens
            continue
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        explained = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
        for entry in inside:
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
        is_free = not any(name in tree.sources[module] for name in ENVIRONMENT)
        if module == ENVIRONMENT_READER or is_free:
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


def folder(tree: Tree, module: str) -> str:
    """The folder of a module below `src/quire`; of a file right in it, its own name."""
    path = tree.paths[module]
    return path.rpartition("/")[0] or path


def mutual_imports(tree: Tree) -> list[str]:
    """Two folders of which each imports from the other, and neither lies in the other."""
    edges: dict[tuple[str, str], str] = {}
    for module in tree.sources:
        for entry in tree.inner_imports(module):
            if entry.target in tree.sources:
                left, right = folder(tree, module), folder(tree, entry.target)
                edges.setdefault((left, right), tree.at(module, entry.line))
    return [
        f"{where}: {left} imports from {right}, which imports from it at {edges[right, left]}"
        for (left, right), where in edges.items()
        if left < right and (right, left) in edges
        if not right.startswith(f"{left}/")
    ]


def full_folders(tree: Tree) -> list[str]:
    files = defaultdict(list)
    for module, path in tree.paths.items():
        if not path.endswith("__init__.py"):
            files[path.rpartition("/")[0]].append(module)
    return [
        f"src/quire/{name}: {len(modules)} files, above {MAX_FILES}; split it by what they serve"
        for name, modules in files.items()
        if len(modules) > MAX_FILES
    ]


def frequent_basenames(tree: Tree) -> list[str]:
    found = defaultdict(list)
    for path in tree.paths.values():
        found[path.rpartition("/")[2]].append(path)
    return [
        f"{name} occurs {len(paths)} times: {', '.join(paths)}"
        for name, paths in found.items()
        if len(paths) > 2 and name != "__init__.py"
    ]


def classes_of_one_name(tree: Tree) -> list[str]:
    found = defaultdict(list)
    for module, syntax in tree.syntax.items():
        for node in syntax.body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(tree.at(module, node.lineno))
    return [
        f"{places[1]}: another class {name} is at {places[0]}"
        for name, places in found.items()
        if len(places) > 1
    ]


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
    mutual_imports,
    full_folders,
    frequent_basenames,
    classes_of_one_name,
)


@pytest.fixture(scope="module")
def quire_tree() -> Tree:
    return Tree({path.relative_to(SRC).as_posix(): path.read_text() for path in SRC.rglob("*.py")})


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(rule: Callable[[Tree], list[str]], quire_tree: Tree) -> None:
    found = rule(quire_tree)
    assert not found, "\n" + "\n".join(found)


def test_server_modules_load_without_torch(quire_tree: Tree) -> None:
    """The rule above reads the source; this one asks Python, other people's packages included."""
    server_modules = [
        name
        for name in quire_tree.sources
        if area(name) in TORCH_FREE + STARTS_WITHOUT_TORCH
        and name != "quire.__main__"
        and find_spec(NEEDS_EXTRA.get(name.rpartition(".")[2], "quire"))
    ]
    lines = [f"import {name}" for name in server_modules]
    code = "\n".join([*lines, "import sys; sys.exit('torch' in sys.modules)"])
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_floors_have_no_cycle_and_only_known_names() -> None:
    for name, rights in ARROWS.items():
        assert set(rights.split()) <= set(ARROWS)
        assert all(name not in _reachable(right) for right in rights.split())
