"""Write the list of names that transformers' sources may read of a config.

    .venv/bin/python tools/config_fields.py

quire leaves out fields of a config.json that are not in the list. The list may have more names than
are read. From configuration files it has all names of fields, arguments and keys. From modeling
files and shared files it has the attributes of objects named `config`, and the texts by which
attributes or items are looked up. tests/tools/test_config_fields.py fails if the list is outdated.
Needs transformers.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import transformers

from quire.models.transformers_names.read_fields import LIST

_SOURCES = Path(transformers.__file__).parent
_OF_A_MODEL = re.compile(r"(configuration|modeling)_\w+\.py")
_SHARED = (
    *("modeling_*.py", "configuration_utils.py", "conversion_mapping.py", "core_model_loading.py"),
    *("activations.py", "cache_utils.py", "masking_utils.py", "monkey_patching.py"),
    *("pytorch_utils.py", "fusion_mapping.py", "quantizers/*.py", "integrations/*.py"),
    *("loss/*.py", "initialization.py", "generation/utils.py"),
)
_OF_OTHERS = re.compile(
    "deepspeed|integration_utils|peft|fsdp|tensor_par|tiktoken|mistral|hub_|gguf|gemm"
)
"""Shared files that read no field of a model's config."""
_ASKING = frozenset({"getattr", "hasattr", "setattr", "get", "pop", "setdefault"})
_NAME = re.compile(r"([a-z]|[A-Z]_)[A-Za-z0-9_]*")


def sources() -> list[Path]:
    """The configuration and modeling files of all models, and the files that they share."""
    models = [p for p in (_SOURCES / "models").rglob("*.py") if _OF_A_MODEL.fullmatch(p.name)]
    shared = [path for pattern in _SHARED for path in _SOURCES.glob(pattern)]
    return sorted({*models, *(path for path in shared if not _OF_OTHERS.search(path.name))})


def names_of(path: Path) -> set[str]:
    """The names of config fields that one file may read."""
    is_config = path.name.startswith("configuration_")
    found = _names(ast.parse(path.read_text(encoding="utf-8")), is_config=is_config)
    return {name for name in found if _NAME.fullmatch(name)}


def _names(tree: ast.AST, *, is_config: bool) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = _last_name(node.value)
            if "config" in owner or "cfg" in owner or (is_config and owner == "self"):
                yield node.attr
        elif isinstance(node, ast.Call) and _last_name(node.func) in _ASKING:
            yield from filter(None, map(_text, node.args))
        elif isinstance(node, ast.Subscript):
            yield _text(node.slice)
        elif isinstance(node, ast.Compare):
            yield _text(node.left)
        elif is_config and isinstance(node, ast.AnnAssign):
            yield _last_name(node.target)
        elif is_config and isinstance(node, ast.arg):
            yield node.arg
        elif is_config and isinstance(node, ast.Dict):  # such as attribute_map
            yield from (_text(each) for each in (*node.keys, *node.values) if each is not None)
        elif is_config and isinstance(node, ast.Tuple | ast.List | ast.Set):  # for a loop
            yield from map(_text, node.elts)


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def content() -> str:
    """The content of the list's file."""
    names = sorted(set().union(*map(names_of, sources())))
    return "\n".join([transformers.__version__, *names]) + "\n"


if __name__ == "__main__":
    LIST.write_text(content(), encoding="utf-8")
