"""The benchmark beside a busy neighbour: there is one when there should be, and none afterwards."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import psutil
import pytest

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def neighbour(
    monkeypatch: pytest.MonkeyPatch, load_script: Callable[[str], ModuleType]
) -> ModuleType:
    module = load_script("benchmarks.cpu.neighbour")
    monkeypatch.setattr(module, "START_S", 0.0)
    return module


def loops() -> list[tuple[int, ...]]:
    """The processors of every busy loop that runs."""
    children = psutil.Process().children()
    return [
        tuple(child.cpu_affinity()) for child in children if "while True" in str(child.cmdline())
    ]


def test_every_other_figure_is_taken_beside_a_loop_on_one_processor(
    neighbour: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def measure() -> float:
        seen.append(loops())
        return 100.0 / (1 + len(seen[-1]))

    speeds = neighbour.alternate("x", measure, 3)
    processors = sorted(os.sched_getaffinity(0))
    expected = [(processors[index % len(processors)],) for index in range(3)]
    assert seen[0::2] == [[], [], []]
    assert seen[1::2] == [[processor] for processor in expected]
    assert loops() == []
    assert (speeds.alone, speeds.beside) == ([100.0] * 3, [50.0] * 3)
    assert speeds.row() == ["x", "100", "50.0", "50.0 to 50.0", "50%"]


def test_a_loop_ends_with_what_fails_beside_it(neighbour: ModuleType) -> None:
    with pytest.raises(ZeroDivisionError), neighbour.busy_processor(0):
        1 / 0  # noqa: B018 - fails on purpose
    assert loops() == []


def test_quire_is_measured_on_the_kernels_that_are_named(
    neighbour: ModuleType, capsys: Capture, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    words = ["--rounds", "1", "--tokens", "6", "--kernels", "torch", "--out", str(out)]
    neighbour.main(words)
    (found,) = json.loads(out.read_text())
    assert found["contender"] == "quire, kernels=torch"
    assert len(found["alone"]) == len(found["beside"]) == 1
    assert min(*found["alone"], *found["beside"]) > 0.1
    assert "| quire, kernels=torch | " in capsys.readouterr().out


def test_a_peer_is_measured_by_its_driver(neighbour: ModuleType, tmp_path: Path) -> None:
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import json, sys\n"
        "words = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "assert words['--model'] == 'own/form' and words['--skip'] == 'prefill,workload'\n"
        "rows = [{'decode_tok_s': 30.0}, {'decode_tok_s': 50.0}]\n"
        "open(words['--out'], 'w').write(json.dumps({'decode1': {'rows': rows}}))\n"
    )
    setup = tmp_path / "peers.toml"
    setup.write_text(
        '[[model]]\nname = "m"\nfolder = "none"\n[[engine]]\nname = "Peer"\nprecision = "bf16"\n'
        f'command = ["{sys.executable}", "{driver}"]\n[engine.models.m]\npath = "own/form"\n'
    )
    engines = neighbour.read_setup(setup).engines
    (peer,) = [engine for engine in engines if engine.name == "Peer"]
    args = neighbour.make_parser().parse_args(["--model", "m", "--rounds", "2"])
    speeds = neighbour.run_peer(peer, args, tmp_path)
    assert speeds.contender == "Peer bf16"
    assert (speeds.alone, speeds.beside) == ([40.0, 40.0], [40.0, 40.0])
