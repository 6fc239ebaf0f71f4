"""examples/: each program runs as its first lines say, and the README names it."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from tests.registering import restored
from tests.server.launching import launched

from quire.core.scheduling.policy import POLICIES

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(name, monkeypatch, capsys, *words):
    """What the program prints."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


def test_tree_search_finds_a_function(monkeypatch, capsys):
    out = run("tree_search", monkeypatch, capsys)
    assert "return os.path.join(path, name)" in out


def test_beam_search_prints_the_best_first(monkeypatch, capsys):
    scores = [
        float(line.split()[0]) for line in run("beam_search", monkeypatch, capsys).splitlines()
    ]
    assert len(scores) == 4 and scores == sorted(scores, reverse=True)


def test_a_policy_is_judged_beside_another(monkeypatch, capsys):
    with restored(POLICIES):  # which the program adds its own to; other tests count them
        lines = run("scheduling_policy", monkeypatch, capsys).splitlines()
    medians = {line.split()[0]: float(line.split()[1]) for line in lines[1:]}
    assert medians["aged_shortest_prompt"] < medians["fcfs"]


def test_a_batch_file_is_answered(monkeypatch, capfd, tmp_path):
    out = run("batch_file", monkeypatch, capfd, tmp_path)
    assert "4 calls answered" in out and "json.dumps: " in out


def test_an_answer_has_the_form_that_was_asked_for(monkeypatch, capsys):
    text, read = run("extraction", monkeypatch, capsys).splitlines()
    assert json.loads(text).keys() == {"function", "num_arguments", "is_method"}
    assert read.startswith("Call(function=")


def test_retrieval_ranks_what_it_found(monkeypatch, capsys):
    scores = [float(line.split()[0]) for line in run("retrieval", monkeypatch, capsys).splitlines()]
    assert len(scores) == 2 and scores == sorted(scores, reverse=True)


def test_an_agent_makes_the_call_and_has_an_answer(monkeypatch, capsys):
    with launched({"num_blocks": 256, "max_num_seqs": 4}) as server:
        lines = run("agent", monkeypatch, capsys, server.url).splitlines()
    assert re.match(r"count_letters\(\{'word': '\w+', 'letter': '[a-z]'\}\) = \d", lines[0])
    assert len(lines) > 1


def test_streams_share_an_engine_in_the_callers_loop(monkeypatch, capsys, forked_engines):
    out = run("async_engine", monkeypatch, capsys)
    # A reader that comes late finds several tokens in a piece, so there may be fewer.
    names = sorted(re.findall(r"--- (story-\d): [1-9]\d* pieces", out))
    assert names == ["story-0", "story-1", "story-2"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_readme_names_it_and_a_test_runs_it(path):
    assert f"examples/{path.name}" in (ROOT / "README.md").read_text()
    assert re.search(rf'run\(\s*"{path.stem}"', Path(__file__).read_text())
