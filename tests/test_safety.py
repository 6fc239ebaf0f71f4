"""Nothing in the package can run code that came with a model or over the network.

Reads the source as text, as `test_architecture` does; the second half shows what breaks a rule.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools.syntax import parsed, walk

SRC = Path(__file__).parent.parent / "src" / "quire"

UNPICKLERS = {
    "cloudpickle",
    "cPickle",
    "dill",
    "jsonpickle",
    "joblib",
    "marshal",
    "pickle",
    "shelve",
}
"""Modules that turn bytes into objects by running what the bytes say."""

BUILTINS = {"__import__", "compile", "eval", "exec"}

METHODS = {
    ("jit", "load"),
    ("hub", "load"),
    ("os", "popen"),
    ("os", "system"),
    ("pandas", "read_pickle"),
    ("subprocess", "getoutput"),
    ("subprocess", "getstatusoutput"),
    ("torch", "load"),
    ("yaml", "full_load"),
    ("yaml", "load"),
    ("yaml", "load_all"),
    ("yaml", "unsafe_load"),
}
"""(what it is called on, its name): unpickle, run a shell, or make any object that YAML names."""

ARGUMENTS = {"allow_pickle", "shell", "trust_remote_code"}
"""Keyword arguments that must not be True, nor computed."""


def unsafe(path: str, source: str) -> list[str]:
    """What in a file may run foreign code, as sentences."""
    return [
        f"{path}:{node.lineno}: {what}"
        for node in walk(parsed(source))
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.Call))
        for what in _complaints(node)
    ]


def _complaints(node: ast.Import | ast.ImportFrom | ast.Call) -> Iterator[str]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.partition(".")[0] in UNPICKLERS:
                yield f"imports {alias.name}"
    elif isinstance(node, ast.ImportFrom):
        module = node.module or ""
        if module.partition(".")[0] in UNPICKLERS:
            yield f"imports {module}"
        for alias in node.names:
            if (module.rpartition(".")[2], alias.name) in METHODS:
                yield f"imports {module}.{alias.name}"
    else:
        yield from _complaints_of_call(node)


def _complaints_of_call(node: ast.Call) -> Iterator[str]:
    called = node.func
    if isinstance(called, ast.Name) and called.id in BUILTINS:
        yield f"calls {called.id}"
    if isinstance(called, ast.Attribute):
        owner = ast.unparse(called.value).rpartition(".")[2]
        if (owner, called.attr) in METHODS:
            yield f"calls {owner}.{called.attr}"
    for keyword in node.keywords:
        is_off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        if keyword.arg in ARGUMENTS and not is_off:
            yield f"sets {keyword.arg}"


def test_nothing_is_unpickled_and_no_foreign_code_run() -> None:
    files = sorted(SRC.rglob("*.py"))
    assert len(files) > 100
    found = [
        sentence
        for path in files
        for sentence in unsafe(path.relative_to(SRC).as_posix(), path.read_text())
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import pickle", "x.py:1: imports pickle"),
        ("def f():\n    import cloudpickle.x as y", "x.py:2: imports cloudpickle.x"),
        ("from marshal import loads", "imports marshal"),
        ("from torch import load", "imports torch.load"),
        ("torch.load(path)", "calls torch.load"),
        ("model = torch.jit.load(path)", "calls jit.load"),
        ("yaml.load(text, Loader=x)", "calls yaml.load"),
        ("np.load(path, allow_pickle=True)", "sets allow_pickle"),
        ("eval(text)", "calls eval"),
        ("exec(compile(text, 'a', 'exec'))", "calls compile"),
        ("subprocess.run(line, shell=True)", "sets shell"),
        ("os.system(line)", "calls os.system"),
        ("AutoModel.from_pretrained(name, trust_remote_code=given)", "sets trust_remote_code"),
    ],
)
def test_code_that_could_run_foreign_code_is_found(source: str, expected: str) -> None:
    assert any(expected in sentence for sentence in unsafe("x.py", source))


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "re.compile(text)",
        "yaml.safe_load(text)",
        "json.load(file)",
        "numpy.load(path, allow_pickle=False)",
        "cursor.exec(line)",
        "f(trust_remote_code=False)",
    ],
)
def test_code_that_only_looks_unsafe_is_not_reported(source: str) -> None:
    assert unsafe("x.py", source) == []
