"""The benchmark of whole engines: the set-up file, turns, noise, the table."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

LoadScript = Callable[[str], ModuleType]

# A driver that writes what the test says: rates and noise by repetition of each process.
FAKE_DRIVER = """
import json, sys
from pathlib import Path

options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
plan = Path(sys.argv[1])
said = json.loads(plan.read_text())
said["calls"].append(options)
rates = said["rates"].pop(0)
plan.write_text(json.dumps(said))
with open(plan.parent / "order", "a") as order:
    print(plan.stem, file=order)
if rates is None:
    sys.exit("broken")
rows = [{"decode_tok_s": rate, "other_cpus": others, "steal_cpus": 0.0} for rate, others in rates]
result = {"version": "9", "peak_rss_mib": 100, "load_s": 1.5, "decode1": {"rows": rows}}
Path(options["--out"]).write_text(json.dumps(result))
"""

SETUP = """
[[model]]
name = "llama-160m"
folder = "{folder}"
num_requests = 16

[[engine]]
name = "Peer"
precision = "bf16"
command = ["{python}", "{driver}", "{plan}"]
skip = ["prefill", "workload"]
[engine.models.llama-160m]
path = "peer-model"
arguments = ["--max-batch", "7"]
"""


@pytest.fixture
def cpu(load_script: LoadScript) -> ModuleType:
    return load_script("benchmarks.cpu.comparison")


@pytest.fixture
def make_setup(tmp_path: Path, model_folder: Path, cpu: ModuleType) -> Callable[..., Any]:
    """quire's rates and the peer's, one list per process -> the set-up file with fake drivers."""
    driver = tmp_path / "driver.py"
    driver.write_text(FAKE_DRIVER)

    def make(ours: list[Any], peer: list[Any], monkeypatch: pytest.MonkeyPatch) -> Path:
        for name, rates in (("ours", ours), ("peer", peer)):
            plan = {"rates": rates, "calls": []}
            (tmp_path / f"{name}.json").write_text(json.dumps(plan))
        path = tmp_path / "setup.toml"
        values = {"python": sys.executable, "driver": driver, "plan": tmp_path / "peer.json"}
        path.write_text(SETUP.format(folder=model_folder, **values))
        read = cpu.read_setup

        def read_with_fakes(path: Path, arguments: tuple[str, ...]) -> Any:
            setup = read(path, arguments)
            command = (sys.executable, str(driver), str(tmp_path / "ours.json"))
            quire = next(one for one in setup.engines if one.key == "quire bf16")
            fake = cpu.EngineSetup("quire", "bf16", command, quire.models)
            return cpu.Setup(setup.models, (fake, *setup.engines[4:]))

        monkeypatch.setattr(cpu, "read_setup", read_with_fakes)
        return path

    return make


@pytest.fixture
def no_roofline(cpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed machine: 47.6 GB/s, 440 bf16."""
    roofline = {
        "processor": "two cores",
        "threads": 2,
        "read_bytes_s": 47.6e9,
        "ops_s": {"bf16": 440e9, "fp32": 190e9, "int8": 900e9, "int4": 900e9},
        "other_cpus": 0.0,
        "steal_cpus": None,
    }
    monkeypatch.setattr(
        cpu.Bench, "_measure_roofline", lambda self, _: self.results.rooflines.append(roofline)
    )


def run(cpu: ModuleType, setup: Path, tmp_path: Path, *more: str) -> tuple[dict[str, Any], str]:
    out, markdown = tmp_path / "out.json", tmp_path / "out.md"
    words = ["--setup", str(setup), "--out", str(out), "--markdown", str(markdown)]
    cpu.main([*words, "--parts", "decode1", "--quiet-wait", "0", *more])
    return json.loads(out.read_text()), markdown.read_text()


def test_the_roofline_is_measured_from_any_folder(
    cpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = subprocess.run

    def ask_for_help(command: list[str], **options: Any) -> None:
        start([*command, "--help"], **options)  # raises an error if the script can't be loaded
        (tmp_path / "roofline.0.json").write_text("{}")

    monkeypatch.setattr(subprocess, "run", ask_for_help)
    monkeypatch.chdir(tmp_path)
    bench = SimpleNamespace(
        folder=Path(),
        prefix=[],
        args=SimpleNamespace(threads=1),
        results=SimpleNamespace(rooflines=[]),
        _save=lambda: None,
    )
    cpu.Bench._measure_roofline(bench, 0)
    assert bench.results.rooflines == [{}]


@pytest.mark.usefixtures("no_roofline")
def test_engines_take_turns_and_noise_is_measured_again(
    cpu: ModuleType, make_setup: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loud = [[10.0, 0.5]]
    setup = make_setup(
        [[[180.0, 0.0]], loud, [[200.0, 0.05]]], [[[100.0, 0.0]], [[102.0, 0.0]]], monkeypatch
    )
    found, report = run(cpu, setup, tmp_path, "--rounds", "2", "--reps", "1")
    order = (tmp_path / "order").read_text().split()
    assert order == ["ours", "peer", "peer", "ours", "ours"]
    rates = [(one["engine"], one["tok_s"]) for one in found["samples"]]
    assert ("quire bf16", 10.0) in rates  # it is kept, and does not count
    line = next(one for one in report.splitlines() if "one stream" in one)
    assert line == ("| llama-160m bf16, one stream | **190** | 101 | 1.88x | 235 | 81% |")
    assert "1 more were thrown away" in report and "| Peer bf16 | 100 (1.5) |" in report


@pytest.mark.usefixtures("no_roofline")
def test_a_driver_gets_model_label_repetitions_and_limit(
    cpu: ModuleType, make_setup: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = make_setup([[[1.0, 0.0]]], [[[1.0, 0.0]]], monkeypatch)
    run(cpu, setup, tmp_path, "--rounds", "1", "--reps", "3", "--retries", "0")
    (told,) = json.loads((tmp_path / "peer.json").read_text())["calls"]
    assert told["--model"] == "peer-model" and told["--label"] == "bf16"
    assert (told["--reps"], told["--limit"]) == ("3", "16")
    assert told["--max-batch"] == "7"  # its own argument stands last and wins
    assert told["--skip"] == "prefill,workload"
    requests = json.loads(Path(told["--workload"]).read_text())["requests"]
    assert len(requests) == 48 and requests[0].keys() == {"id", "prompt_len", "output_len"}


@pytest.mark.usefixtures("no_roofline")
def test_a_peer_that_fails_is_named_and_the_others_go_on(
    cpu: ModuleType, make_setup: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = make_setup([[[180.0, 0.0]]], [None], monkeypatch)
    found, report = run(cpu, setup, tmp_path, "--rounds", "1")
    assert [one["tok_s"] for one in found["samples"]] == [180.0]
    assert "FAILED: Peer bf16, llama-160m: llama-160m.Peer-bf16.0.log: ended with 1" in report
    assert "broken" in (tmp_path / "out.raw" / "llama-160m.Peer-bf16.0.log").read_text()


@pytest.mark.usefixtures("no_roofline")
def test_append_keeps_what_was_measured(
    cpu: ModuleType, make_setup: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = [[[100.0, 0.0]]]
    setup = make_setup([*rates, [[[300.0, 0.0]]][0]], [*rates, *rates], monkeypatch)
    run(cpu, setup, tmp_path, "--rounds", "1", "--retries", "0")
    found, report = run(cpu, setup, tmp_path, "--rounds", "1", "--retries", "0", "--append")
    assert sorted(one["tok_s"] for one in found["samples"]) == [100.0, 100.0, 100.0, 300.0]
    assert "**200**" in report


def test_figures_that_were_never_quiet_are_marked(
    load_script: LoadScript, model_folder: Path
) -> None:
    report, setup = load_script("benchmarks.cpu.tables"), load_script("benchmarks.cpu.peer_setup")
    results = report.Results(
        [report.Sample("quire int8", "llama-160m", "workload", 0, 700.0, 0.3)],
        [
            {
                **{"processor": "two cores", "threads": 2, "other_cpus": 0.5, "steal_cpus": 0.0},
                "read_bytes_s": 47.6e9,
                "ops_s": {"bf16": 440e9, "fp32": 190e9, "int8": 900e9, "int4": 900e9},
            }
        ],
    )
    (line,) = report.find_lines(results, [setup.Model("llama-160m", model_folder)])
    assert str(line.ours) == "700 (loud)" and line.ratio is None
    assert "LOUD in every round" in report.roofline_note(results.rooflines)
    assert line.title == "crowd of 48" and line.share == pytest.approx(700 / 2265, rel=2e-3)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no [[model]]"),
        ("[[model]]\nname = 'm'", "lacks ['folder']"),
        ("[[model]]\nname = 'm'\nfolder = 'f'\nsize = 1", "has ['size']"),
        (
            "[[model]]\nname = 'm'\nfolder = 'f'\n[[engine]]\nname = 'e'\nprecision = 'bf16'\n"
            "command = ['c']\n[engine.models.other]\npath = 'p'",
            "e bf16 has model 'other'",
        ),
        (
            "[[model]]\nname = 'm'\nfolder = 'f'\n[[engine]]\nname = 'e'\nprecision = 'int2'\n"
            "command = ['c']\nmodels = {}",
            "precision is 'int2'",
        ),
        (
            "[[model]]\nname = 'm'\nfolder = 'f'\n[[engine]]\nname = 'e'\nprecision = 'bf16'\n"
            "command = ['c']\nmodels = {}\nskip = ['all']",
            "skip is ['all']",
        ),
        ("[[model", "Expected"),
    ],
)
def test_a_set_up_that_is_not_understood_is_refused(
    load_script: LoadScript, tmp_path: Path, text: str, complaint: str
) -> None:
    setup = load_script("benchmarks.cpu.peer_setup")
    path = tmp_path / "setup.toml"
    path.write_text(text)
    with pytest.raises(setup.SetupError) as refused:
        setup.read_setup(path)
    assert complaint in str(refused.value) and str(path) in str(refused.value)


def test_nothing_left_to_measure_is_refused(load_script: LoadScript, model_folder: Path) -> None:
    setup = load_script("benchmarks.cpu.peer_setup")
    models = (setup.Model("llama-160m", model_folder),)
    whole = setup.Setup(models, setup.quire_engines(models, ("--kernels", "avx2")))
    for engine in whole.engines:
        assert engine.arguments == ("--kernels", "avx2")
        assert engine.long_context[-2:] == engine.server[-2:] == engine.arguments
    left = setup.choose(whole, [], ["quire"], ["int8", "int4"])
    assert [one.key for one in left.engines] == ["quire int8", "quire int4"]
    for names in (["other"], [], []), ([], ["other"], []), ([], [], ["int2"]):
        with pytest.raises(setup.SetupError, match="none of the set-up's is left"):
            setup.choose(whole, *names)
