"""`quire bench throughput` from the command line's words to the table and the files."""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from quire.bench import throughput
from quire.bench.workload import LengthSpec, WorkloadSpec, request_lengths
from quire.errors import ConfigurationError
from quire.observability.step_trace import read_step_trace

SMALL = shlex.split(
    "--num-prompts 6 --input-mean 20 --input-min 4 --input-max 40"
    " --output-mean 5 --output-min 2 --output-max 9"
    " --dtype float32 --num-blocks 64 --max-num-seqs 4"
)

VLLM_KEYS = {
    "date",
    "backend",
    "model_id",
    "num_prompts",
    "request_rate",
    "duration",
    "completed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    "max_concurrent_requests",
    *(
        f"{statistic}_{name}_ms"
        for statistic in ("mean", "median", "std", "p90", "p99")
        for name in ("ttft", "tpot", "itl", "e2el")
    ),
}
OUR_KEYS = {
    "dtype",
    "num_threads",
    "processor",
    "versions",
    "workload",
    "engine",
    "peak_kv_use",
    "mean_kv_use",
    "num_preemptions",
    "num_recomputed_tokens",
    "prefix_hit_rate",
    "num_drafts",
    "num_accepted_drafts",
    "draft_tokens_a_step",
    "rounds",
    "baselines",
    "trace",
    "mean_kv_useful_bytes",
    "mean_kv_unfilled_bytes",
    "mean_kv_unused_bytes",
    "mean_kv_reserved_bytes",
    "mean_kv_in_flight_bytes",
    "mean_kv_moving_bytes",
    "mean_kv_cached_bytes",
    "mean_kv_free_bytes",
    "mean_kv_saved_bytes",
    "kv_useful_share",
}


def _main(*words: str) -> int:
    parser = argparse.ArgumentParser()
    throughput.add_arguments(parser)
    return throughput.main(parser.parse_args([*SMALL, *words]))


def test_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    json_file, trace_file = tmp_path / "out.json", tmp_path / "steps.jsonl"
    assert _main("--reps", "2", "--output-json", str(json_file), "--trace", str(trace_file)) == 0
    found = json.loads(json_file.read_text())
    assert set(found) == VLLM_KEYS | OUR_KEYS
    assert found["completed"] == found["num_prompts"] == 6
    assert found["backend"] == "quire" and found["dtype"] == "float32"
    spec = WorkloadSpec(6, LengthSpec(20, 4, 40), LengthSpec(5, 2, 9))
    assert found["total_output_tokens"] == sum(output for _, output in request_lengths(spec))
    assert found["engine"]["max_num_seqs"] == 4 and found["engine"]["num_blocks"] == 64
    assert len(found["rounds"]["quire"]) == 2
    assert {"other_cores", "steal_cores", "output_throughput"} <= set(found["rounds"]["quire"][0])
    assert found["baselines"] == {}
    num_steps = found["trace"]["all steps"]["num_steps"]
    assert num_steps == len(list(read_step_trace(trace_file)))
    assert sum(found["trace"]["all steps"]["shares"].values()) == pytest.approx(1)
    shown = capsys.readouterr().out
    ledger = "quire's KV memory, mean over the run\nuseful"
    for text in (
        "output tokens/s",
        "TPOT ms, p99",
        "prefix hit rate",
        "per sequence and step",
        ledger,
    ):
        assert text in shown
    assert "embedded model, float32" in shown


def test_against_both_baselines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    json_file = tmp_path / "out.json"
    words = shlex.split(
        "--baseline static --baseline hf --widths 2 4 --choosing-prompts 4 --reps 1"
    )
    assert _main(*words, "--output-json", str(json_file)) == 0
    found, shown = json.loads(json_file.read_text()), capsys.readouterr().out
    assert set(found["rounds"]) == {"quire", "static", "hf"}
    assert "transformers" in found["versions"]
    for name in ("static", "hf"):
        baseline = found["baselines"][name]
        assert baseline["width"] in (2, 4)
        assert set(baseline["width_choice"]["output_throughput"]) == {"2", "4"}
        assert baseline["total_output_tokens"] == found["total_output_tokens"]
        ratio = found["output_throughput"] / baseline["output_throughput"]
        assert baseline["quire_times_faster"]["of_medians"] == pytest.approx(ratio)
        head = f"{name} x{baseline['width']}"
        assert f"quire makes {ratio:.2f} times the output tokens/s of {head}" in shown


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--reps", "0"], "reps is 0"),
        (["--widths", "4", "0"], "widths is 0"),
        (["--choosing-prompts", "0"], "choosing_prompts is 0"),
        (["--num-prompts", "0"], "num_prompts is 0"),
        (["--output-json", "/no/such/folder/x.json"], "no such folder"),
        (["--max-num-seqs", "0"], "max_num_seqs is 0"),
        (["--max-model-len", "32"], "but max_model_len is 32; lower input_max"),
        (["--baseline", "static", "--widths", "48"], "static fits at none of the widths 48"),
    ],
)
def test_options_that_cannot_be_measured_are_refused(words: list[str], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        _main(*words)


def test_the_arguments_load_no_torch() -> None:
    code = "import sys; import quire.bench.throughput; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
