"""The README's claims that can be checked: its code, its commands, its figures, its links."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from quire.cli.parser import build_parser

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


def code_blocks(text: str, *languages: str) -> list[str]:
    """The fenced blocks of these languages."""
    blocks = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [body for language, body in blocks if language in languages]


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


def test_readme_has_at_most_150_lines(readme: str) -> None:
    assert len(readme.splitlines()) <= 150


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
```sh
$ ./scripts/demo serve \\
    --port 80  # now
```
```python
x = 1
```
"""


def test_blocks_and_commands_are_read() -> None:
    assert commands(SAMPLE) == [["./scripts/demo", "serve", "--port", "80"]]
    assert code_blocks(SAMPLE, "python") == ["x = 1\n"]
