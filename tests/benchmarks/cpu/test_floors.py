"""The floors are those that follow from bytes and operations, worked out here by other means."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from quire.bench.workload import WorkloadSpec, request_lengths

LoadScript = Callable[[str], ModuleType]

# Two Zen 4 cores: GB/s and G operations per second, as measured when the aims were set.
READ_BYTES_S = 47.6e9
OPS_S = {"bf16": 440e9, "int8": 900e9, "int4": 900e9, "fp32": 190e9}
LINEAR_WEIGHTS = 12 * (768 * 64 * (2 * 12 + 2 * 4) + 3 * 768 * 2048)
HEAD_WEIGHTS = 32_000 * 768
KV_BYTES = 12 * 2 * 4 * 64 * 2  # per token


@pytest.fixture
def make_floors(load_script: LoadScript, model_folder: Path) -> Callable[[str], Any]:
    floors = load_script("benchmarks.cpu.floors")
    roofline = floors.Roofline(READ_BYTES_S, OPS_S)
    shape = floors.ModelShape.from_folder(model_folder)
    return lambda name: floors.Floors(shape, floors.PRECISIONS[name], roofline)


def test_the_shape_counts_weights_and_kv(load_script: LoadScript, model_folder: Path) -> None:
    shape = load_script("benchmarks.cpu.floors").ModelShape.from_folder(model_folder)
    assert shape.layer_weights == LINEAR_WEIGHTS == 75_497_472
    assert shape.head_weights == HEAD_WEIGHTS
    assert shape.kv_bytes_per_token == KV_BYTES


def test_heads_and_their_size_have_defaults(load_script: LoadScript, model_folder: Path) -> None:
    path = model_folder / "config.json"
    config = json.loads(path.read_text())
    del config["num_key_value_heads"], config["head_dim"]
    path.write_text(json.dumps(config))
    shape = load_script("benchmarks.cpu.floors").ModelShape.from_folder(model_folder)
    assert (shape.num_kv_heads, shape.head_dim) == (12, 64)


def test_the_best_of_several_rooflines_counts(load_script: LoadScript) -> None:
    slow = {"read_bytes_s": 30e9, "ops_s": {"bf16": 450e9}}
    fast = {"read_bytes_s": 47e9, "ops_s": {"bf16": 400e9}}
    roofline = load_script("benchmarks.cpu.floors").Roofline.best([slow, fast])
    assert (roofline.read_bytes_s, roofline.ops_s) == (47e9, {"bf16": 450e9})


@pytest.mark.parametrize(
    ("precision", "one_stream", "prefill_512", "prefill_2048", "crowd"),
    [("bf16", 235, 2740, 2331, 1197), ("int8", 465, 5274, 3943, 2265)],
)
def test_the_floors_of_the_160m_model(
    make_floors: Callable[[str], Any],
    precision: str,
    one_stream: float,
    prefill_512: float,
    prefill_2048: float,
    crowd: float,
) -> None:
    floors = make_floors(precision)
    assert floors.one_stream_tok_s() == pytest.approx(one_stream, rel=2e-3)
    assert floors.prefill_tok_s(512) == pytest.approx(prefill_512, rel=2e-3)
    assert floors.prefill_tok_s(2048) == pytest.approx(prefill_2048, rel=2e-3)
    lengths = request_lengths(WorkloadSpec(num_prompts=48))
    assert sum(prompt for prompt, _ in lengths) == 9_695
    assert sum(output for _, output in lengths) == 10_660
    assert floors.crowd_tok_s(lengths, 48) == pytest.approx(crowd, rel=2e-3)


def test_a_decode_step_reads_weights_and_kv(make_floors: Callable[[str], Any]) -> None:
    read = 2 * (LINEAR_WEIGHTS + HEAD_WEIGHTS) + 16 * 8193 * KV_BYTES
    assert make_floors("bf16").decode_tok_s([8192] * 16) == pytest.approx(16 * READ_BYTES_S / read)


def test_int4_has_a_scale_and_an_offset_for_32_weights(make_floors: Callable[[str], Any]) -> None:
    read = (LINEAR_WEIGHTS + HEAD_WEIGHTS) * 18 / 32 + 101 * KV_BYTES
    assert make_floors("int4").decode_tok_s([100]) == pytest.approx(READ_BYTES_S / read)


def test_prefill_multiplies_each_weight_with_each_token(make_floors: Callable[[str], Any]) -> None:
    num_pairs = sum(range(1, 513))
    attention = 4 * 12 * 12 * 64 * num_pairs
    linear = 2 * 512 * LINEAR_WEIGHTS + 2 * HEAD_WEIGHTS
    seconds = linear / OPS_S["int8"] + attention / OPS_S["bf16"]
    assert make_floors("int8").prefill_tok_s(512) == pytest.approx(512 / seconds)


@pytest.mark.parametrize("max_num_seqs", [1, 3, 48])
def test_the_crowd_computes_every_token_once(
    make_floors: Callable[[str], Any], max_num_seqs: int
) -> None:
    lengths = [(5000, 1), (10, 7), (2048, 2), (1, 1), (300, 40)]
    steps = list(make_floors("bf16")._crowd_steps(lengths, max_num_seqs))
    assert sum(step.num_tokens for step in steps) == sum(p + o - 1 for p, o in lengths)
    assert sum(step.num_sampled for step in steps) == sum(o for _, o in lengths)
    assert max(step.num_sampled for step in steps) <= max_num_seqs
    # Prompts fill steps to the budget, beside what decodes.
    assert max(step.num_tokens for step in steps) == 2048


def test_one_request_alone_is_its_prefill_and_its_steps(make_floors: Callable[[str], Any]) -> None:
    floors = make_floors("bf16")
    steps = [floors.chunk(0, 200, sampled=True)]
    steps += [floors.chunk(first, 1, sampled=True) for first in range(200, 229)]
    seconds = sum(floors.step_s(step) for step in steps)
    assert floors.crowd_tok_s([(200, 30)], 1) == pytest.approx(30 / seconds)


def test_operations_alone_bound_the_crowd_from_above(make_floors: Callable[[str], Any]) -> None:
    floors = make_floors("bf16")
    lengths = request_lengths(WorkloadSpec(num_prompts=48))
    assert floors.crowd_ops_tok_s(lengths) == pytest.approx(1_235, rel=2e-3)
    assert floors.crowd_tok_s(lengths, 48) < floors.crowd_ops_tok_s(lengths)
