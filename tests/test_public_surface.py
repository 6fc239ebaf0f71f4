"""What users may rely on: exported names, command-line flags, environment variables.

It equals `tests/data/public_surface.json`. What is in that list stays, or is removed on purpose and
with a line in CHANGELOG.md; nothing gets in by accident. To write the list anew, after thinking:

    .venv/bin/python tests/test_public_surface.py
"""

import argparse
import ast
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tools.syntax import parsed, walk

import quire
from quire.bench import throughput
from quire.bench.quality import perplexity
from quire.cli.parser import build_parser
from quire.core.sampling_params import BeamSearchParams, SamplingParams
from quire.options.engine_options import EngineOptions
from quire.replay import bench_serve

ROOT = Path(__file__).parent.parent
LIST = ROOT / "tests" / "data" / "public_surface.json"
ENVIRONMENT = re.compile(r"\benviron\b|\bgetenv\b")
BENCHMARKS = {
    "serve": bench_serve.add_arguments,
    "throughput": throughput.add_arguments,
    "perplexity": perplexity.add_arguments,
}

ADVICE = (
    "the public surface changed; if that is meant, write the list anew with"
    " `.venv/bin/python tests/test_public_surface.py`, and say it in CHANGELOG.md"
)


def flags(parser: argparse.ArgumentParser, command: str = "quire") -> dict[str, list[str]]:
    """Every command's arguments: flags by name, the others by their metavar."""
    found: dict[str, list[str]] = {command: []}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                found |= flags(inner, f"{command} {name}")
        else:
            found[command] += action.option_strings or [str(action.metavar or action.dest)]
    found[command].sort()
    return found


def environment_variables(source: str) -> Iterator[str]:
    """Names that a source takes from `os.environ` or `os.getenv`; ValueError for a computed one."""
    if not ENVIRONMENT.search(source):  # most files, which need not be parsed
        return
    for node in walk(parsed(source)):
        asked: ast.expr | None = None
        if isinstance(node, ast.Subscript):
            target, asked = node.value, node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            target, asked = node.func, node.args[0]
        elif isinstance(node, ast.Compare):
            target, asked = node.comparators[0], node.left
        if asked is None or not ENVIRONMENT.search(ast.unparse(target)):
            continue
        if not isinstance(asked, ast.Constant) or not isinstance(asked.value, str):
            raise ValueError(f"line {node.lineno}: the variable's name is computed")
        yield asked.value


def surface() -> dict[str, Any]:
    """The surface as it is now."""
    sources = sorted((ROOT / "src" / "quire").rglob("*.py"))
    return {
        "exports": sorted(quire.__all__),
        "engine_options": sorted(field.name for field in fields(EngineOptions)),
        "sampling_params": sorted(field.name for field in fields(SamplingParams)),
        "beam_search_params": sorted(field.name for field in fields(BeamSearchParams)),
        "flags": flags(build_parser(BENCHMARKS)),
        "environment_variables": sorted(
            {name for path in sources for name in environment_variables(path.read_text())}
        ),
    }


def differences(listed: Any, now: Any, place: str = "") -> list[str]:
    """What was added to or taken from the list, by name."""
    if isinstance(listed, dict):
        return [
            sentence
            for name in sorted({*listed, *now})
            for sentence in differences(
                listed.get(name, []), now.get(name, []), f"{place}/{name}" if place else name
            )
        ]
    added = [f"{place}: {name} is new" for name in sorted(set(now) - set(listed))]
    return added + [f"{place}: {name} is gone" for name in sorted(set(listed) - set(now))]


def test_the_surface_equals_the_list() -> None:
    found = differences(json.loads(LIST.read_text()), surface())
    assert not found, "\n".join(["", *found, ADVICE])


def test_no_flag_stands_without_help() -> None:
    parser = build_parser(BENCHMARKS)
    silent = []

    def visit(inner: argparse.ArgumentParser) -> None:
        for action in inner._actions:
            if isinstance(action, argparse._SubParsersAction):
                for choice in action.choices.values():
                    visit(choice)
            elif not action.help:
                silent.append(f"{inner.prog} {action.dest}")

    visit(parser)
    assert silent == []


def test_a_change_is_told_by_name() -> None:
    listed = {"exports": ["LLM", "Old"], "flags": {"quire": ["-h"], "quire x": ["--a"]}}
    now = {"exports": ["LLM", "New"], "flags": {"quire": ["-h", "--b"]}}
    assert differences(listed, now) == [
        "exports: New is new",
        "exports: Old is gone",
        "flags/quire: --b is new",
        "flags/quire x: --a is gone",
    ]
    assert differences(listed, listed) == []


def test_flags_are_found_at_every_depth() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    commands = parser.add_subparsers().add_parser("run", add_help=False).add_subparsers()
    deep = commands.add_parser("fast", add_help=False)
    deep.add_argument("--speed", "-s")
    deep.add_argument("paths", metavar="PATH")
    assert flags(parser) == {
        "quire": [],
        "quire run": [],
        "quire run fast": ["--speed", "-s", "PATH"],
    }


@pytest.mark.parametrize(
    "source",
    [
        "os.environ['QUIRE_X']",
        "os.environ.get('QUIRE_X', '0')",
        "os.getenv('QUIRE_X')",
        "getenv('QUIRE_X') if 'QUIRE_X' in os.environ else 0",
        "os.environ['QUIRE_X'] = '1'",
    ],
)
def test_an_environment_variable_is_found_however_it_is_read(source: str) -> None:
    assert set(environment_variables(source)) == {"QUIRE_X"}


def test_other_look_ups_are_no_environment_variables() -> None:
    assert list(environment_variables("d['A']; d.get('B'); f('C'); 'D' in d; x < y")) == []


def test_a_computed_name_is_refused() -> None:
    with pytest.raises(ValueError, match="line 2: the variable's name is computed"):
        list(environment_variables("import os\nos.environ.get(name)"))


if __name__ == "__main__":
    LIST.write_text(json.dumps(surface(), indent=2) + "\n")
    print(f"wrote {LIST.relative_to(ROOT)}")
