"""The README's claims that can be checked: the path of a request, its code, its commands."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools.request_path import LIST, Trace, first_line, line_counts, parts, trace_chat

from quire.cli.parser import build_parser

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
HEADING = "The path of a request"


def code_blocks(text: str, *languages: str) -> list[str]:
    """The fenced blocks of these languages."""
    blocks = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [body for language, body in blocks if language in languages]


def request_path(text: str) -> list[tuple[str, str]]:
    """(file, what is said of it) of the numbered list under HEADING, in its order.

    ValueError for an item that is not one file and a text.
    """
    found = re.search(rf"^#+ {HEADING}\s*$(.*?)(?=^#|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"the README has no section {HEADING!r}")
    stops = []
    for number, item in enumerate(re.findall(r"^\d+\. .*", found[1], flags=re.MULTILINE), 1):
        parsed = re.fullmatch(rf"{number}\. `([\w/]+\.py)`: (.+)", item)
        if parsed is None:
            raise ValueError(f"item {number} of {HEADING!r} is not a file and a text: {item!r}")
        stops.append((parsed[1], parsed[2]))
    return stops


def commands(text: str) -> list[list[str]]:
    """The command lines of the shell blocks, as words, without comments."""
    found = []
    for block in code_blocks(text, "sh", "bash", "console", "shell"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words:
                found.append(words)
    return found


@pytest.fixture(scope="module")
def readme() -> str:
    return README.read_text()


@pytest.fixture(scope="module")
def traces() -> Iterator[Trace]:
    """Of a streamed chat, a new one each time."""
    return iter(trace_chat, None)


def test_the_path_is_that_of_a_traced_chat(readme: str, traces: Iterator[Trace]) -> None:
    """All files that hand on, there and back; `python tools/request_path.py --readme` writes them.

    What two processes do at the same moment may come in another order, once.
    """
    listed = [name for name, _ in request_path(readme)]
    for _ in range(3):
        trace = next(traces)
        traced = [name for part in parts(trace) for name in part.new]
        assert sorted(listed) == sorted(traced)
        if listed == traced:
            break
    assert listed == traced
    said, counted = (numbers(text) for text in (LIST.findall(readme)[0], line_counts(trace)))
    assert said[-4] == counted[0]
    assert all(abs(a / b - 1) < 0.1 for a, b in zip(said[-3:], counted[1:], strict=True))


def numbers(text: str) -> list[int]:
    return [int(word.replace(",", "")) for word in re.findall(r"\b\d[\d,]*\b", text)]


def test_each_stop_says_what_its_file_says(readme: str) -> None:
    """Its docstring's first line, which is a short sentence on one line."""
    stops = request_path(readme)
    assert len(stops) >= 20
    assert [(name, first_line(name)) for name, _ in stops] == stops


def test_python_blocks_are_python_that_imports_what_there_is(readme: str) -> None:
    blocks = code_blocks(readme, "python", "py")
    assert blocks
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "quire":
                namespace: dict[str, object] = {}
                exec(ast.unparse(node), namespace)
                assert {alias.name for alias in node.names} <= set(namespace)


def test_commands_are_ones_that_exist(readme: str) -> None:
    lines = commands(readme)
    assert ["./scripts/demo"] in lines
    for words in lines:
        if words[0].startswith(("./", "scripts/")):
            assert (ROOT / words[0]).is_file(), f"{words[0]} is in the README, but not there"
        is_demo = words[0].endswith("scripts/demo")
        if words[0] in ("quire", ".venv/bin/quire") or (is_demo and len(words) > 1):
            if words[1] == "bench":
                from quire.bench import throughput  # slow; only where the README has it

                parser = build_parser({"throughput": throughput.add_arguments})
            else:
                parser = build_parser()
            parser.parse_args(words[1:])


def test_the_benchmark_says_its_figures_command_and_hardware(readme: str) -> None:
    found = re.search(
        r"^## One honest benchmark\n(.*?)^## ", readme, flags=re.MULTILINE | re.DOTALL
    )
    assert found is not None
    assert re.search(r"\d+ (output )?tokens/s|\| *\d", found[1]), "no figure"
    assert re.search(r"quire bench throughput|benchmarks/cpu\.py", found[1]), "no command"
    assert re.search(r"EPYC|Xeon|Ryzen|Core", found[1]), "no hardware"


def test_links_inside_the_repository_lead_somewhere(readme: str) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", readme)
    inside = [target for target in targets if not re.match(r"\w+:", target)]
    assert [target for target in inside if not (ROOT / target).exists()] == []


SAMPLE = """# x
## The path of a request

**In the front**

1. `server/app.py`: takes it
2. `text/a.py`: makes tokens of it

Again: `server/app.py`.

## Next
3. `not/this.py`: x

```sh
$ ./scripts/demo serve \\
    --port 80  # now
```
```python
x = 1
```
"""


def test_the_list_is_read_in_order_to_its_end() -> None:
    stops = [("server/app.py", "takes it"), ("text/a.py", "makes tokens of it")]
    assert request_path(SAMPLE) == stops


def test_a_missing_list_and_an_item_without_a_file_are_refused() -> None:
    with pytest.raises(ValueError, match="no section"):
        request_path("# x")
    with pytest.raises(ValueError, match=r"item 1 of .* is not a file and a text: .1\. somewhere"):
        request_path(f"## {HEADING}\n1. somewhere\n")


def test_blocks_and_commands_are_read() -> None:
    assert commands(SAMPLE) == [["./scripts/demo", "serve", "--port", "80"]]
    assert code_blocks(SAMPLE, "python") == ["x = 1\n"]
