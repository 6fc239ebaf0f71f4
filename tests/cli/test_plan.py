"""`quire plan`, as it is typed: what it prints, its exit codes, and what it refuses."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from tests.planning.costs import known_step_costs

from quire.cli.main import main
from quire.cli.parser import build_parser
from quire.planning.plan import Planner
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
    assert "not measured here; `--measure` measures it, once" in printed
    words = f"--load {LOAD} --num-blocks 50 --measure"
    assert printed.endswith(f"measure with: quire plan --costs {tmp_path}/costs.json {words}\n")


@pytest.mark.parametrize(("said", "code"), [("y", 0), ("", 1), (EOFError, 1)])
def test_on_a_terminal_it_offers_to_measure(
    said: str | type[Exception],
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[str] = []
    asked: list[str] = []

    def measure(self: Planner, name: str, *_: object) -> None:
        measured.append(name)
        monkeypatch.setattr(StepCostFile, "find", lambda self, facts: known_step_costs())

    def read(question: str) -> str:
        asked.append(question)
        if isinstance(said, str):
            return said
        raise said

    monkeypatch.setattr(Planner, "measure", measure)
    monkeypatch.setattr("builtins.input", read)
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    words = ("--quantization", "int8", "--max-num-seqs", "4", "--num-blocks", "200")
    assert plan(tmp_path, "--load", LOAD, *words, "--kv-cache-dtype", "auto") == code
    assert asked == ["measure now? It loads the model and takes about 10 s [y/N] "]
    assert measured == (["own"] if code == 0 else [])
    assert ("best: quire serve" in capsys.readouterr().out) is (code == 0)


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
    ("held_out", "repeated", "doubt"),
    [
        (0.05, 0.1, None),
        (0.53, 0.67, "the same steps differed by 67% when they were measured twice"),
        (0.53, 0.1, "predicted step times are off by 53% in the mean"),
    ],
)
def test_large_errors_are_told_beside_the_best(
    held_out: float,
    repeated: float,
    doubt: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = known_step_costs()
    costs.accuracy = replace(costs.accuracy, held_out=held_out, repeated=repeated)
    monkeypatch.setattr(StepCostFile, "find", lambda self, facts: costs)
    words = ("--load", LOAD, "--quantization", "int8", "--max-num-seqs", "4")
    assert plan(tmp_path, *words, "--num-blocks", "200", "--kv-cache-dtype", "auto") == 0
    after_best = capsys.readouterr().out.partition("\nbest: ")[2].splitlines()[1]
    assert after_best.startswith(f"doubt: {doubt}") if doubt else "doubt" not in after_best


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--load", LOAD, "--price", "0"], "--price is 0, but must be above 0"),
        (["--load", LOAD, "--measure-time", "-1"], "--measure-time is -1, but must be above 0"),
        (["--load", "x"], "load has 'x', but must be a file or prompt=N"),
        (["--load", LOAD, "--slo", "x"], "slo has 'x', but must be ttft=TIME"),
        (["--load", LOAD, "--measure", "int5"], "--quantization is 'int5', but must be"),
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
