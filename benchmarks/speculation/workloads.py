"""Tasks with known answers, made from a git repository's own files and history.

rewrite   a file, then the same file after a commit
diff      a file, then the commit's diff of it
agent     a tool's results, then tool calls that replace the changed lines
schema    a file, then a list of its functions as JSON, by a schema
prose     the beginning of a page of documentation, then more of it
code      the beginning of a file, then more of it
random    random letters, then more of them: nothing repeats, so hardly a draft is found
"""

import ast
import difflib
import itertools
import json
import random
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.speculation.changes import MOST_CHARS, Change, HistoryError, changes

NUM_CONTEXT_LINES = 2
"""Unchanged lines around the changed ones in a tool call."""

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "functions": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "line": {"type": "integer"},
                    "parameters": {"type": "array", "items": {"type": "string"}},
                    "is_public": {"type": "boolean"},
                    "docstring": {"type": "string"},
                },
                "required": ["name", "line", "parameters", "is_public", "docstring"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["functions"],
    "additionalProperties": False,
}


class Task(NamedTuple):
    """A prompt and the answer that is known for it."""

    prompt: str
    answer: str
    #: The JSON schema that the answer follows; None for free text.
    schema: dict[str, Any] | None = None


def rewrites(repository: Path) -> Iterator[Task]:
    """Files, and the same files after a commit."""
    for change in changes(repository):
        prompt = f"{change.old}\nThe whole file after this change: {change.title}\n\n"
        yield Task(prompt, change.new)


def diffs(repository: Path) -> Iterator[Task]:
    """Files, and diffs of them."""
    for change in changes(repository):
        old, new = change.old.splitlines(keepends=True), change.new.splitlines(keepends=True)
        prompt = f"{change.path}:\n{change.old}\nA diff for this change: {change.title}\n\n"
        names = f"a/{change.path}", f"b/{change.path}"
        yield Task(prompt, "".join(difflib.unified_diff(old, new, *names)))


def tool_calls(repository: Path) -> Iterator[Task]:
    """Transcripts of an agent that has read a file, and its calls to replace lines of it."""
    for change in changes(repository):
        calls = [json.dumps(call) for call in _replacements(change)]
        reading = json.dumps({"name": "read_file", "arguments": {"path": change.path}})
        prompt = (
            "Tools: read_file(path), str_replace(path, old_str, new_str)\n"
            f"user: {change.title}\nassistant: {reading}\n"
            f"tool: {json.dumps({'path': change.path, 'content': change.old})}\nassistant: "
        )
        yield Task(prompt, "\n".join(calls))


def lists_of_functions(repository: Path) -> Iterator[Task]:
    """Files, and their functions as JSON by a schema."""
    for path in _files(repository, "*.py", MOST_CHARS):
        text = path.read_text()
        functions = [_describe(node) for node in ast.walk(ast.parse(text)) if _is_function(node)]
        if len(functions) > 1:
            prompt = f"{text}\nThe functions of this file as JSON:\n"
            yield Task(prompt, json.dumps({"functions": functions}), SCHEMA)


def pages(repository: Path) -> Iterator[Task]:
    """Pages of documentation, in two parts."""
    for path in _files(repository, "*.md", 1 << 20):
        yield from _halves(path.read_text()[:MOST_CHARS])


def sources(repository: Path) -> Iterator[Task]:
    """Python files, in two parts."""
    for path in _files(repository, "*.py", 1 << 20):
        yield from _halves(path.read_text()[:MOST_CHARS])


def random_letters(repository: Path) -> Iterator[Task]:
    """Random letters, in two parts. `repository` is not read."""
    rng = random.Random(0)
    while True:
        prompt, answer = ("".join(rng.choices(string.ascii_letters, k=500)) for _ in range(2))
        yield Task(prompt, answer)


WORKLOADS: dict[str, Callable[[Path], Iterator[Task]]] = {
    "rewrite": rewrites,
    "diff": diffs,
    "agent": tool_calls,
    "schema": lists_of_functions,
    "prose": pages,
    "code": sources,
    "random": random_letters,
}


def make_tasks(name: str, repository: Path, count: int) -> list[Task]:
    """The first `count` tasks of a workload.

    Raises HistoryError if the repository has fewer.
    """
    found = list(itertools.islice(WORKLOADS[name](repository), count))
    if len(found) < count:
        raise HistoryError(
            f"{repository} has files for {len(found)} of the {count} tasks of {name!r}; give fewer"
            " streams, or a repository with its whole history"
        )
    return found


def _replacements(change: Change) -> Iterator[dict[str, Any]]:
    """The tool calls that turn the old file into the new one."""
    old, new = change.old.splitlines(keepends=True), change.new.splitlines(keepends=True)
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for group in matcher.get_grouped_opcodes(NUM_CONTEXT_LINES):
        (_, old_first, _, new_first, _), (_, _, old_end, _, new_end) = group[0], group[-1]
        arguments = {
            "path": change.path,
            "old_str": "".join(old[old_first:old_end]),
            "new_str": "".join(new[new_first:new_end]),
        }
        yield {"name": "str_replace", "arguments": arguments}


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef)


def _describe(node: Any) -> dict[str, Any]:
    return {
        "name": node.name,
        "line": node.lineno,
        "parameters": [each.arg for each in node.args.args],
        "is_public": not node.name.startswith("_"),
        "docstring": ast.get_docstring(node) or "",
    }


def _files(repository: Path, pattern: str, most_chars: int) -> Iterator[Path]:
    """The files of the folders `src` and `docs` that are long enough, by path."""
    for folder in ("src", "docs"):
        for path in sorted((repository / folder).rglob(pattern)):
            if MOST_CHARS // 3 <= path.stat().st_size <= most_chars:
                yield path


def _halves(text: str) -> Iterator[Task]:
    """A text, cut at the end of a line near its middle."""
    end = text.find("\n", len(text) // 2) + 1
    if 0 < end < len(text):
        yield Task(text[:end], text[end:])
