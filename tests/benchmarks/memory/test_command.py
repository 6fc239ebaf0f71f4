"""`python -m benchmarks.memory` from the command line's words to the table and the files."""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.memory import command as memory

from quire.bench.baselines.contiguous import KV_ALLOCATORS
from quire.errors import ConfigurationError

SMALL = shlex.split(
    "--num-prompts 12 --input-mean 20 --output-mean 10 --max-model-len 128 --num-slots 600"
    " --max-num-seqs 16 --max-num-batched-tokens 256 --dtype float32"
)


def _main(*words: str) -> int:
    parser = argparse.ArgumentParser()
    memory.add_arguments(parser)
    return memory.main(parser.parse_args([*SMALL, *words]))


def test_the_simulation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    words = shlex.split("--request-rate inf --sharing-prompts 0 --placement first_fit --base-ms 10")
    assert _main(*words, "--output-json", str(path)) == 0
    found = json.loads(path.read_text())
    assert list(found["allocators"]) == list(KV_ALLOCATORS)
    assert found["placement"] == "first_fit" and found["sharing"] == []
    assert found["load"]["requests_per_s"] is None and found["load"]["num_prompts"] == 12
    assert found["budget"]["num_slots"] == 600
    assert found["shape"] is None  # no figures are published for this load
    shown = capsys.readouterr()
    assert "37 KV blocks of 16" in shown.out and "published" not in shown.out
    for name in KV_ALLOCATORS:
        assert f"{name}: " in shown.err


def test_step_takes_the_given_cost(tmp_path: Path) -> None:
    seconds = []
    for base_ms in ("10", "20"):
        path = tmp_path / f"{base_ms}.json"
        words = shlex.split("--allocators paged --request-rate inf --sharing-prompts 0")
        costs = ["--base-ms", base_ms, "--token-us", "0", "--context-token-us", "0"]
        _main(*words, *costs, "--output-json", str(path))
        paged = json.loads(path.read_text())["allocators"]["paged"]
        assert paged["duration_s"] == pytest.approx(paged["num_steps"] * int(base_ms) / 1000)
        seconds.append(paged["duration_s"])
    assert seconds[1] == pytest.approx(2 * seconds[0])


def test_the_engine_and_sharing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    words = shlex.split("--engine --allocators contiguous_oracle paged")
    words += shlex.split("--sharing-prompts 2 --branches 3")
    assert _main(*words, "--output-json", str(path)) == 0
    found = json.loads(path.read_text())
    assert list(found["allocators"]) == ["contiguous_oracle", "paged"]
    assert found["mode"] == "on the embedded model, in wall time"
    assert [(entry["kind"], entry["width"]) for entry in found["sharing"]] == [
        ("parallel", 3),
        ("beams", 3),
    ]
    assert "beams 3:" in capsys.readouterr().out


def test_a_published_load_stands_beside_its_figures() -> None:
    parser = argparse.ArgumentParser()
    memory.add_arguments(parser)
    for words, shape in (
        ([], "sharegpt"),
        (["--lengths", "alpaca"], "alpaca"),
        (["--num-slots", "16000"], None),
        (["--output-mean", "300"], None),
        (["--block-size", "32"], None),
    ):
        args = parser.parse_args(words)
        setting = memory._setting(args, memory._load(args), memory._budget(args))
        assert setting["shape"] == shape
        json.dumps(setting, allow_nan=False)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--num-prompts 0", "num_prompts is 0"),
        ("--request-rate 0", "request_rate is 0.0"),
        ("--branches 1", "branches is 1, but must be at least 2"),
        ("--sharing-prompts -1", "sharing_prompts is -1"),
        ("--num-slots 9", "num_slots is 9"),
        ("--max-num-seqs 0", "max_num_seqs is 0"),
        ("--base-ms -1", "base_s is -0.001"),
        ("--engine --token-us 5", "token_us is a cost on the virtual clock"),
        ("--engine --placement first_fit", "the engine places runs by buddy"),
        ("--output-json /no/such/folder/x.json", "no such folder"),
        ("--plot /no/such/folder/x.png", "no such folder"),
        ("--num-slots 100", "needs 8 adjacent KV blocks"),
    ],
)
def test_options_that_cannot_be_measured_are_refused(words: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        _main(*shlex.split(words))


def test_a_plot_is_drawn_or_refused_before_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(memory, "_carry", lambda *_: pytest.fail("it began to work"))
    with pytest.raises(ConfigurationError, match="needs matplotlib"):
        _main("--plot", str(tmp_path / "out.png"))


def test_the_arguments_load_no_torch() -> None:
    code = "import sys; import benchmarks.memory.command; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
