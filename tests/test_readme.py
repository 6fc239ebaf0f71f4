"""The README's claims that can be checked: the path of a request, its code, its commands."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from quire.cli.parser import build_parser

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
HEADING = "The path of a request"


def code_blocks(text: str, *languages: str) -> list[str]:
    """The fenced blocks of these languages."""
    blocks = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [body for language, body in blocks if language in languages]


def request_path(text: str) -> list[str]:
    """The files that the numbered list under HEADING names, in its order, relative to `src/quire`.

    ValueError for an item without a file.
    """
    found = re.search(rf"^#+ {HEADING}\s*$(.*?)(?=^#|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"the README has no section {HEADING!r}")
    files = []
    for item in re.findall(r"^\d+\.\s+(.*(?:\n[ \t]+\S.*)*)", found[1], flags=re.MULTILINE):
        names = re.findall(r"`(?:src/quire/)?([\w/]+\.py)`", item)
        if not names:
            raise ValueError(f"an item of {HEADING!r} names no file: {item!r}")
        files += names
    return files


def imported_files(path: str, root: Path) -> set[str]:
    """What a file of ours imports of ours, anywhere in it, relative to `root`."""
    found = set()
    for node in ast.walk(ast.parse((root / path).read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        names = [module.removeprefix("quire.").replace(".", "/") for module in modules]
        found.update(f"{name}.py" for name in names if (root / f"{name}.py").exists())
    return found


def against_the_imports(files: list[str], root: Path) -> list[str]:
    """Pairs of the path whose later file imports the earlier one, directly or through others.

    A request goes down the floors: a stop never depends on one before it.
    """
    reach: dict[str, set[str]] = {}

    def reachable(path: str) -> set[str]:
        if path not in reach:
            reach[path] = set()
            for name in imported_files(path, root):
                reach[path] |= {name} | reachable(name)
        return reach[path]

    return [
        f"{later} imports {earlier}, but stands after it"
        for index, earlier in enumerate(files)
        for later in files[index + 1 :]
        if earlier != later and earlier in reachable(later)
    ]


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


def test_every_stop_of_a_request_is_a_file(readme: str) -> None:
    files = request_path(readme)
    assert len(files) >= 6
    missing = [name for name in files if not (ROOT / "src" / "quire" / name).is_file()]
    assert missing == []


def test_a_request_goes_down_the_floors(readme: str) -> None:
    assert against_the_imports(request_path(readme), ROOT / "src" / "quire") == []


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
                from quire.bench.memory import command as memory

                kinds = {"throughput": throughput, "memory": memory}
                parser = build_parser({name: kind.add_arguments for name, kind in kinds.items()})
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

1. `server/app.py` takes it
   and `src/quire/text/a.py` too
2. **step**: `core/b.py`

## Next
3. `not/this.py`

```sh
$ ./scripts/demo serve \\
    --port 80  # now
```
```python
x = 1
```
"""


def test_the_list_is_read_in_order_to_its_end() -> None:
    assert request_path(SAMPLE) == ["server/app.py", "text/a.py", "core/b.py"]


def test_a_missing_list_and_an_item_without_a_file_are_refused() -> None:
    with pytest.raises(ValueError, match="no section"):
        request_path("# x")
    with pytest.raises(ValueError, match="names no file: 'somewhere'"):
        request_path(f"## {HEADING}\n1. somewhere\n")


def test_blocks_and_commands_are_read() -> None:
    assert commands(SAMPLE) == [["./scripts/demo", "serve", "--port", "80"]]
    assert code_blocks(SAMPLE, "python") == ["x = 1\n"]


def test_a_stop_that_depends_on_one_before_it_is_found(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "top.py").write_text("from quire.core import middle")
    (tmp_path / "core" / "middle.py").write_text("def f():\n    import quire.core.low")
    (tmp_path / "core" / "low.py").write_text("import json")
    assert against_the_imports(["top.py", "core/middle.py", "core/low.py"], tmp_path) == []
    assert against_the_imports(["core/low.py", "top.py"], tmp_path) == [
        "top.py imports core/low.py, but stands after it"
    ]
