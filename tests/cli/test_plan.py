"""`quire plan`, as it is typed: what it prints, its exit codes, and what it refuses."""

import json
import shlex
from pathlib import Path

import pytest
from tests.planning.costs import known_step_costs

from quire.cli.main import main
from quire.cli.parser import build_parser
from quire.planning.step_cost_file import StepCostFile

LOAD = "prompt=30,output=4,rate=9,requests=8"


def plan(path: Path, *words: str) -> int:
    return main(["plan", "--costs", str(path / "costs.json"), *words])


def test_without_measurements_it_says_what_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(tmp_path, "--load", LOAD, "--num-blocks", "50") == 1
    printed = capsys.readouterr().out
    assert "50 x 16" in printed
    assert "not measured here; `quire plan --measure` measures it, once" in printed


def test_with_them_it_answers_in_words_and_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepCostFile, "find", lambda self, facts: known_step_costs())
    words = ("--load", LOAD, "--slo", "ttft=9s", "--price", "2", "--quantization", "int8")
    words += ("--max-num-seqs", "4", "--num-blocks", "200", "--kv-cache-dtype", "auto")
    assert plan(tmp_path, *words) == 0
    printed = capsys.readouterr().out
    (best,) = [line for line in printed.splitlines() if line.startswith("best: ")]
    command = shlex.split(best.removeprefix("best: quire "))
    served = build_parser().parse_args(command)
    assert (served.quantization, served.block_size, served.max_num_seqs) == ("int8", 16, 4)
    assert (served.num_blocks, served.kv_cache_dtype) == (200, None)
    assert plan(tmp_path, *words, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["best"]["max_num_seqs"] == 4
    assert data["best"]["cost_per_million_tokens"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--load", LOAD, "--price", "0"], "--price is 0, but must be above 0"),
        (["--load", LOAD, "--measure-time", "-1"], "--measure-time is -1, but must be above 0"),
        (["--load", "x"], "load has 'x', but must be a file or prompt=N"),
        (["--load", LOAD, "--slo", "x"], "slo has 'x', but must be ttft=TIME"),
        (["--load", LOAD, "--measure", "int5"], "quantization is 'int5', but must be"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(tmp_path, *words) == 1
    assert message in capsys.readouterr().err


def test_a_load_must_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan(tmp_path)
    assert "the following arguments are required: --load" in capsys.readouterr().err
