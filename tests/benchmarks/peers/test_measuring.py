"""The drivers measure what they say: exact lengths, the common load, the middle of a sequence."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import quire

LoadScript = Callable[[str], ModuleType]
EMBEDDED = str(Path(quire.__file__).parent / "embedded_model")
ENGINE = ("--model", EMBEDDED, "--dtype", "float32")


@pytest.fixture
def driver(load_script: LoadScript, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Token ids below the embedded model's vocabulary; this process keeps its cores."""
    module = load_script("driver")
    monkeypatch.setattr(module, "HIGH_TOKEN_ID", 4000)
    monkeypatch.setattr(module, "hold_threads", lambda num_threads: None)
    yield module


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "workload.json"
    lengths = [(9, 3), (20, 1), (5, 6)]
    requests = [{"id": i, "prompt_len": p, "output_len": o} for i, (p, o) in enumerate(lengths)]
    path.write_text(json.dumps({"requests": requests}))
    return path


def test_the_result_file_has_every_part(
    load_script: LoadScript,
    driver: ModuleType,
    workload: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "DECODE_TOKENS", 8)
    monkeypatch.setattr(driver, "PREFILL_TOKENS", (16, 40))
    out = tmp_path / "result.json"
    words = [*ENGINE, "--workload", str(workload), "--out", str(out), "--label", "fp32"]
    load_script("quire_offline").main([*words, "--threads", "1", "--reps", "1"])
    found = json.loads(out.read_text())
    assert (found["peer"], found["label"], found["requests"]) == ("quire", "fp32", 3)
    assert found["decode1"]["reps"] == 2 and found["decode1"]["decode_tok_s"]["min"] > 0
    for part in ("prefill16", "prefill40"):
        assert found[part]["prefill_tok_s"]["median"] > 0
    (row,) = found["workload"]["rows"]
    assert row["output_tokens"] == 10
    assert row["output_tok_s"] == pytest.approx(10 / row["wall_s"])
    assert row["total_tok_s"] == pytest.approx(44 / row["wall_s"])
    assert row.keys() >= {"other_cpus", "steal_cpus"}
    assert found["peak_rss_mib"] > 50 and found["load_s"] > 0 and found["kv_bytes"] > 0


def test_measurement_rejects_answers_of_another_length(driver: ModuleType, workload: Path) -> None:
    engine = SimpleNamespace(
        name="short", version="0", run_workload=lambda prompts, lens: 9, details=dict
    )
    args = argparse.Namespace(
        **{"workload": workload, "limit": 0, "skip": {"decode1", "prefill"}, "label": ""},
        **{"model": "m", "threads": 1, "reps": 1, "pause_pidfile": None, "quiet_wait": 0.0},
    )
    with pytest.raises(AssertionError, match="9, 10"):
        driver.Measurement(args, engine).run()


def test_prompts_depend_on_place_and_repetition_alone(driver: ModuleType) -> None:
    # The peers' drivers draw so, too.
    expected = np.random.default_rng([77, 1, 5]).integers(300, driver.HIGH_TOKEN_ID, 9).tolist()
    assert driver.draw_tokens(9, 1, 5) == expected != driver.draw_tokens(9, 0, 5)


def test_limit_and_skip(driver: ModuleType, workload: Path) -> None:
    assert len(driver.read_workload(workload, 2)) == 2
    needed = ["--model", "m", "--workload", str(workload), "--out", "o"]
    parser = driver.make_parser("")
    assert driver.parse_args(parser, [*needed, "--skip", "decode1,"]).skip == {"decode1"}
    for wrong in (["--skip", "crowd"], ["--reps", "0"], ["--limit", "-1"]):
        with pytest.raises(SystemExit):
            driver.parse_args(parser, [*needed, *wrong])


def test_options_reach_the_engine(load_script: LoadScript, workload: Path) -> None:
    script = load_script("quire_offline")
    words = ["--model", "m", "--workload", str(workload), "--out", "o", "--quantization", "int8"]
    options = script.engine_options(script.make_parser().parse_args(words))
    assert options["quantization"] == "int8" and "kernels" not in options
    assert options["enable_prefix_caching"] is False and options["max_num_seqs"] == 48


# ---- long contexts --------------------------------------------------------------------------


def test_quire_decodes_in_the_middle_of_long_contexts(
    load_script: LoadScript, driver: ModuleType, tmp_path: Path
) -> None:
    out = tmp_path / "result.json"
    words = [*ENGINE, "--out", str(out), "--threads", "1", "--cases", "1x5000,3x70"]
    load_script("quire_long_context").main([*words, "--steps", "2", "--reps", "2"])
    cases = json.loads(out.read_text())["cases"]
    assert [one["case"] for one in cases] == ["1x5000", "3x70"]
    for one in cases:
        assert len(one["rows"]) == 2 and one["tok_s"] > 0 and one["rss_bytes"] > 1 << 20


def test_random_kv_is_read_at_every_position(
    load_script: LoadScript, driver: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case's blocks hold numbers, and another context gives other tokens."""
    script, long_context = load_script("quire_long_context"), load_script("long_context")
    args = long_context.make_parser("").parse_args([*ENGINE, "--out", "o", "--cases", "2x100"])
    args.quantization = args.kernels = None
    engine = script.QuireRunner(Path(EMBEDDED), args)
    engine.start(args.cases[0], 4)
    used = engine._pages[: 2 * script._num_blocks(105)]
    assert bool((used[:, :8] != 0).any(dim=1).all()) and bool(used.isfinite().all())
    assert [engine.step() for _ in range(4)] == [2, 2, 2, 2]
    engine.end()


def test_a_raised_model_is_the_same_but_for_its_length(
    load_script: LoadScript, model_folder: Path
) -> None:
    (model_folder / "tokenizer_config.json").write_text('{"model_max_length": 4096, "a": 1}')
    (model_folder / "weights").write_text("w")
    long_context = load_script("long_context")
    with long_context.raised_model(str(model_folder), 33_000) as folder:
        raised = json.loads((folder / "config.json").read_text())
        original = json.loads((model_folder / "config.json").read_text())
        assert raised == original | {"max_position_embeddings": 33_000}
        assert json.loads((folder / "tokenizer_config.json").read_text()) == {"a": 1}
        assert (folder / "weights").read_text() == "w"
    assert original["max_position_embeddings"] == 4096 and not folder.exists()


def test_cases_are_read(load_script: LoadScript) -> None:
    long_context = load_script("long_context")
    assert [str(one) for one in long_context.parse_cases("1x32768,16x8192")] == [
        "1x32768",
        "16x8192",
    ]
    for wrong in ("0x5", "4", "ax5", "2x0"):
        with pytest.raises(ValueError):
            long_context.parse_cases(wrong)


class _FakeVLLM:
    """An engine that computes one prompt a step, and a token of all others."""

    def __init__(self, **options: Any) -> None:
        self.llm_engine = self
        self.waiting: list[str] = []
        self.counts: dict[str, int] = {}

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        self.waiting.append(name)

    def step(self) -> list[Any]:
        if self.waiting:
            self.counts[self.waiting.pop(0)] = 0
        self.counts = {name: count + 1 for name, count in self.counts.items()}
        return [
            SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[0] * count)])
            for name, count in self.counts.items()
        ]

    def abort_request(self, names: list[str]) -> None:
        self.counts = {name: one for name, one in self.counts.items() if name not in names}

    def has_unfinished_requests(self) -> bool:
        return bool(self.counts)


def test_vllm_is_timed_when_all_its_requests_decode(
    load_script: LoadScript, driver: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = SimpleNamespace(__version__="0", LLM=_FakeVLLM, SamplingParams=dict)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    script, long_context = load_script("vllm_long_context"), load_script("long_context")
    args = long_context.make_parser("").parse_args(
        ["--model", "m", "--out", str(tmp_path / "o"), "--cases", "3x50,2x10", "--steps", "4"]
    )
    engine = script.VLLM(tmp_path, args)
    long_context.measure(engine, args)
    assert [one["case"] for one in json.loads(args.out.read_text())["cases"]] == ["3x50", "2x10"]
    assert engine._engine.counts == {}


def test_the_table_of_long_contexts(load_script: LoadScript, model_folder: Path) -> None:
    script, setup = (
        load_script("benchmarks.cpu.long_context"),
        load_script("benchmarks.cpu.peer_setup"),
    )
    rates = {"bf16": 440e9, "fp32": 190e9, "int8": 900e9}
    machine = {"processor": "two cores", "threads": 2, "other_cpus": 0.0, "steal_cpus": 0.0}
    case = {"case": "2x8192", "rss_bytes": 700 << 20}

    def rows(*pairs: tuple[float, float]) -> list[dict[str, float]]:
        return [{"tok_s": rate, "other_cpus": noise, "steal_cpus": 0.0} for rate, noise in pairs]

    found = script.Found(
        [{**machine, "read_bytes_s": 47.6e9, "ops_s": rates}],
        {
            "quire bf16": [{**case, "rows": rows((150.0, 0.0), (10.0, 0.5))}],
            "Peer bf16": [{**case, "rows": rows((60.0, 0.4))}],
        },
    )
    model = setup.Model("llama-160m", model_folder)
    engines = [setup.EngineSetup(name, "bf16", (), {}) for name in ("quire", "Peer")]
    line = script.make_report(found, engines, model, "2x8192").splitlines()[2]
    floor = 2 * 47.6e9 / (200_146_944 + 2 * 8193 * 12_288)
    assert line == (
        f"| llama-160m bf16, 2 x 8,192 | 150 | 60.0 (loud) | {floor:,.0f} | {150 / floor:.0%}"
        " | 192 | 700 |"
    )
