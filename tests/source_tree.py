"""The sources of a package, read as text: their syntax, and what each file imports."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tools.syntax import parsed


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
        self.syntax = {name: parsed(source) for name, source in self.sources.items()}
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
