"""The limits of docs/STYLE.md: small functions, files, classes and signatures, in all our Python.

A limit is raised in RAISED, in a commit that says why.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools import prose
from tools.syntax import parsed

ROOT = Path(__file__).parent.parent
FOLDERS = ("src", "tests", "benchmarks", "tools", "records")

MAX_FUNCTION_LINES = 70
MAX_FILE_LINES = 800
MAX_CLASS_METHODS = 20
MAX_PARAMETERS = 8

RAISED: dict[tuple[str, str], int] = {}
"""(place, what is counted), as a complaint prints them -> the limit that holds there instead:
`("src/quire/x.py: C.f", "parameters"): 12`, `("src/quire/x.py", "lines"): 600`."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Every function and class at any depth, with its dotted name."""
    for name in ("body", "handlers", "cases", "orelse", "finalbody"):
        for child in getattr(node, name, ()):
            inner = prefix
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = f"{prefix}{child.name}."
                yield inner[:-1], child
            yield from _definitions(child, inner)


def _num_lines(node: Function) -> int:
    """From `def` to the last line, docstring included, decorators not."""
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def _num_parameters(node: Function, *, is_method: bool) -> int:
    """All but `self` or `cls`; `*args` and `**kwargs` are one each."""
    arguments = node.args
    names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    names += [extra for extra in (arguments.vararg, arguments.kwarg) if extra is not None]
    is_static = any(ast.unparse(entry) == "staticmethod" for entry in node.decorator_list)
    return len(names) - (is_method and not is_static)


def _is_kernel(node: Function) -> bool:
    """Compiled by Triton: the parameters are what a launch passes, and nothing can bundle them."""
    return any(ast.unparse(entry).startswith("triton.jit") for entry in node.decorator_list)


def _methods(node: ast.ClassDef) -> list[Function]:
    return [
        entry for entry in node.body if isinstance(entry, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]


def untidy(path: str, source: str, raised: dict[tuple[str, str], int] | None = None) -> list[str]:
    """What in a file is above its limit, as sentences."""
    raised = RAISED if raised is None else raised
    found = []

    def check(place: str, line: int, size: int, limit: int, what: str) -> None:
        limit = raised.get((place, what), limit)
        if size > limit:
            found.append(f"{path}:{line}: {place} has {size} {what}, above {limit}")

    syntax = parsed(source)
    check(path, 1, len(source.splitlines()), MAX_FILE_LINES, "lines")
    methods: set[Function] = set()
    for name, node in _definitions(syntax):
        place = f"{path}: {name}"
        if isinstance(node, ast.ClassDef):
            methods.update(_methods(node))
            check(place, node.lineno, len(_methods(node)), MAX_CLASS_METHODS, "methods")
        else:
            check(place, node.lineno, _num_lines(node), MAX_FUNCTION_LINES, "lines")
            if not _is_kernel(node):
                size = _num_parameters(node, is_method=node in methods)
                check(place, node.lineno, size, MAX_PARAMETERS, "parameters")
    return found


def _files() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def test_everything_is_within_its_limits() -> None:
    found = [
        sentence
        for path in _files()
        for sentence in untidy(path.relative_to(ROOT).as_posix(), path.read_text())
    ]
    assert not found, "\n" + "\n".join(found)


def test_no_raised_limit_is_left_over() -> None:
    for place, what in RAISED:
        path = ROOT / place.partition(":")[0]
        assert path.exists(), f"{place} is in RAISED, but there is no such file"
        found = untidy(path.relative_to(ROOT).as_posix(), path.read_text(), {})
        assert any(f": {place} has " in entry and f" {what}," in entry for entry in found), (
            f"{place} is within the usual limit of {what}; take it out of RAISED"
        )


def _docstring(source: str) -> str:
    """Of a module. Reads no further: to parse all sources once more would take seconds."""
    body = source.lstrip()
    if body.startswith('"""') and '"""' in body[3:]:
        body = body[: body.index('"""', 3) + 3]
    return ast.get_docstring(ast.parse(body)) or ""


def test_every_module_says_what_it_is_for() -> None:
    missing = [
        path.relative_to(ROOT).as_posix()
        for path in _files()
        if path.name != "conftest.py" and path.read_text().strip()
        if not _docstring(path.read_text())
    ]
    assert not missing, f"no module docstring in {missing}"


MAX_FIRST_LINE_WORDS, MAX_FIRST_LINE_CHARACTERS = 16, 100


def poor_first_line(source: str) -> str | None:
    """What is wrong with the first line of a module's docstring; None: nothing."""
    text = _docstring(source)
    line, _, rest = text.partition("\n")
    if not line:
        return "there is none"
    if rest and not rest.startswith("\n"):
        return "the sentence goes on in the second line"
    if len(line.split()) > MAX_FIRST_LINE_WORDS or len(line) > MAX_FIRST_LINE_CHARACTERS:
        return f"it has {len(line.split())} words and {len(line)} characters"
    return None


def test_first_lines_are_short_sentences() -> None:
    found = [
        f"{path.relative_to(ROOT)}:1: {complaint}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        if (complaint := poor_first_line(path.read_text()))
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "is_poor"),
    [
        ('"""Blocks of the KV cache."""', False),
        ('"""Blocks of the KV cache.\n\nMore.\n"""', False),
        ('"""Blocks of the KV cache, which\nare small."""', True),
        (f'"""{"word " * 17}."""', True),
        (f'"""{"w" * 101}"""', True),
        ("import os", True),
    ],
)
def test_a_poor_first_line_is_found(source: str, is_poor: bool) -> None:
    assert bool(poor_first_line(source)) == is_poor


#: Rule of `tools.prose` -> the findings that are left in src/quire, tools and examples. Lower a
#: number when you mend some; raise none.
LEFT_IN_PROSE = {
    "poor-beginnings": 0,
    "poor-phrases": 0,
    "long-sentences": 1,
    "vague-sentences": 17,
    "fields-in-class-docstrings": 0,
    "functions-without-steps": 0,
    "stale-names": 0,
}


@pytest.fixture(scope="module")
def sources() -> list[prose.SourceFile]:
    return prose.source_files([prose.SOURCES, ROOT / "tools", ROOT / "examples"])


@pytest.mark.parametrize("rule", [*prose.RULES, "stale-names"])
def test_prose_gets_no_worse(sources: list[prose.SourceFile], rule: str) -> None:
    found = prose.findings(rule, sources)
    assert len(found) <= LEFT_IN_PROSE[rule], "\n" + "\n".join(map(str, found))


@pytest.mark.parametrize("rule", ["poor-beginnings", "poor-phrases"])
def test_measurements_and_records_begin_with_their_subject(rule: str) -> None:
    files = prose.source_files([ROOT / "benchmarks", ROOT / "records"])
    assert not prose.findings(rule, files)


def _function(num_lines: int, parameters: str = "") -> str:
    return f"def f({parameters}):\n" + "    pass\n" * (num_lines - 1)


def _class(num_methods: int) -> str:
    return "class C:\n" + "".join(f"    def m{index}(self): ...\n" for index in range(num_methods))


EIGHT = "a, b, /, c, *d, e, f=1, g=2, **h"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (_function(71), "x.py:1: x.py: f has 71 lines, above 70"),
        ("\n" * 3 + _function(71), "x.py:4: x.py: f has 71"),
        ("x = 1\n" * 801, "x.py:1: x.py has 801 lines, above 800"),
        (_class(21), "x.py:1: x.py: C has 21 methods, above 20"),
        (_function(3, f"{EIGHT[:-3]}i, **h"), "x.py: f has 9 parameters, above 8"),
        (f"@triton.jit\ndef k(i, {EIGHT}):\n" + "    pass\n" * 70, "x.py:2: x.py: k has 71 lines"),
        (f"class C:\n    async def f(self, i, {EIGHT}): ...", "x.py:2: x.py: C.f has 9 parameters"),
        (f"class C:\n    @staticmethod\n    def f(i, {EIGHT}): ...", "x.py: C.f has 9 parameters"),
        ("if a:\n  def g():\n    def f(i, " + EIGHT + "): ...", "x.py: g.f has 9 parameters"),
    ],
)
def test_code_above_a_limit_is_found(source: str, expected: str) -> None:
    assert [entry for entry in untidy("x.py", source) if expected in entry]


@pytest.mark.parametrize(
    "source",
    [
        _function(70, EIGHT),
        "@decorator\n" * 9 + _function(70),
        "x = 1\n" * 800,
        _class(20),
        f"@triton.jit(do_not_specialize=['i'])\ndef k(i, {EIGHT}): ...",
        f"class C:\n    def f(self, {EIGHT}): ...",
        f"class C:\n    @classmethod\n    def f(cls, {EIGHT}): ...",
    ],
)
def test_code_at_its_limit_passes(source: str) -> None:
    assert untidy("x.py", source) == []


def test_a_raised_limit_holds_for_its_place_only() -> None:
    source = _function(80) + _function(81).replace("f(", "g(")
    assert untidy("x.py", _function(80), {("x.py: f", "parameters"): 80}) != []
    assert untidy("x.py", source, {("x.py: f", "lines"): 80, ("y.py: g", "lines"): 99}) == [
        "x.py:81: x.py: g has 81 lines, above 70"
    ]
