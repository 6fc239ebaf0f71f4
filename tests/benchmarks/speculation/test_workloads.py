"""Tasks come from a repository's files and history, and their answers are what the files say."""

import ast
import json
from pathlib import Path

import pytest
from benchmarks.speculation.changes import HistoryError, changes
from benchmarks.speculation.workloads import WORKLOADS, make_tasks


def test_changes_are_whole_files_before_and_after(repository: Path) -> None:
    found = list(changes(repository))
    assert {change.path for change in found} == {f"src/part_{number}.py" for number in range(3)}
    for change in found:
        assert change.title == "change a function"
        assert change.new == (repository / change.path).read_text()
        assert change.old == change.new.replace("changed", "plain")


@pytest.mark.parametrize("name", WORKLOADS)
def test_each_workload_has_prompts_and_answers(name: str, repository: Path) -> None:
    (task,) = make_tasks(name, repository, 1)
    assert task.prompt and task.answer
    assert (task.schema is not None) == (name == "schema")


def test_answers_quote_what_changed(repository: Path) -> None:
    (rewrite,) = make_tasks("rewrite", repository, 1)
    ast.parse(rewrite.answer)
    (diff,) = make_tasks("diff", repository, 1)
    assert "-def _plain_3" in diff.answer and "+def _changed_3" in diff.answer
    (agent,) = make_tasks("agent", repository, 1)
    (call,) = [json.loads(line) for line in agent.answer.splitlines()]
    old, new = (call["arguments"][name] for name in ("old_str", "new_str"))
    assert old.replace("plain_3", "changed_3").replace("two plain", "two changed") == new
    (schema,) = make_tasks("schema", repository, 1)
    functions = json.loads(schema.answer)["functions"]
    assert [each["name"] for each in functions][2:4] == ["_plain_2", "_changed_3"]
    assert functions[0]["parameters"] == ["first_value", "second_value"]


def test_too_small_a_repository_is_refused_by_name(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(HistoryError, match="files for 3 of the 4 tasks of 'rewrite'"):
        make_tasks("rewrite", repository, 4)
    with pytest.raises(HistoryError, match="git can't read the history"):
        make_tasks("diff", tmp_path, 1)
