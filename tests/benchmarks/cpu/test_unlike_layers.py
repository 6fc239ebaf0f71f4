"""What a step needs follows from windows and states, worked out here by hand."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 4, 2, 16, 300
SHARED = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
}
LAYER_WEIGHTS = HIDDEN * HEAD_DIM * 2 * (HEADS + KV_HEADS) + 3 * HIDDEN * INNER
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 2
PAIR_OPS = 4 * HEADS * HEAD_DIM


@pytest.fixture
def script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("benchmarks.cpu.unlike_layers")


def make_needs(script: ModuleType, folder: Path, **config: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(SHARED | config))
    return script.Needs.of(script.read_config(folder))


@pytest.fixture
def windowed(script: ModuleType, tmp_path: Path) -> Any:
    """Two layers with a window of 8, one without."""
    return make_needs(
        script,
        tmp_path,
        architectures=["Gemma3ForCausalLM"],
        num_hidden_layers=3,
        sliding_window=8,
        sliding_window_pattern=3,
    )


def test_kv_bytes_count_a_window_no_further_than_it_reads(windowed: Any) -> None:
    assert [windowed.kv_bytes(context) for context in (5, 8, 100)] == [
        3 * 5 * TOKEN_BYTES,
        3 * 8 * TOKEN_BYTES,
        (100 + 2 * 8) * TOKEN_BYTES,
    ]
    only_weights = windowed.step_bytes([])
    assert windowed.step_bytes([5, 100]) == only_weights + (15 + 116) * TOKEN_BYTES
    # The norms' weights are few, the head is the embedding.
    linears = 2 * (3 * LAYER_WEIGHTS + VOCAB * HIDDEN)
    assert linears < only_weights < 1.02 * linears
    assert windowed.weight_bytes == pytest.approx(only_weights, rel=0.01)


def test_prompts_multiply_what_each_token_sees(windowed: Any) -> None:
    length = 20
    seen = [min(token + 1, 8) for token in range(length)]
    num_pairs = 2 * sum(seen) + sum(range(1, length + 1))
    expected = length * windowed.linear_ops + PAIR_OPS * num_pairs
    assert windowed.prompt_ops(length) == expected
    assert windowed.linear_ops == pytest.approx(2 * 3 * LAYER_WEIGHTS, rel=0.02)


def test_states_are_read_and_written(script: ModuleType, tmp_path: Path) -> None:
    needs = make_needs(
        script,
        tmp_path,
        architectures=["FalconH1ForCausalLM"],
        num_hidden_layers=2,
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=32,
        mamba_d_conv=4,
    )
    scan, conv = 64 * 32 * 4, 3 * (64 + 2 * 32) * 4
    assert needs.state_bytes == 2 * (scan + conv)
    many = needs.step_bytes([7, 7]) - needs.step_bytes([])
    assert many == 2 * (2 * 7 * TOKEN_BYTES + 2 * needs.state_bytes)


def test_a_mixture_is_refused(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="without experts"):
        make_needs(
            script,
            tmp_path,
            architectures=["MixtralForCausalLM"],
            num_hidden_layers=1,
            num_local_experts=4,
            num_experts_per_tok=2,
        )


def test_the_report_has_floors_and_ratios(script: ModuleType, windowed: Any) -> None:
    ours = script.Figures(200.0, 50.0, 3 << 20, 0.0, 1 << 20, 0.5, 1e9, 1e9)
    peer = script.Figures(100.0, 20.0, 6 << 20, 0.0)
    load = script.Load.parse("2x100")
    alone = script.make_report(windowed, [(load, ours, None)])
    beside = script.make_report(windowed, [(load, replace(ours), peer)])
    assert "| 2 x 100: decode, tokens/s | 50.0 | 100 | 50% | - | - |" in alone
    assert "| 2 x 100: decode, tokens/s | 50.0 | 100 | 50% | 20.0 | 2.50 |" in beside
    ops = windowed.step_ops([100, 100])
    assert ops == 2 * (windowed.step_weight_bytes + PAIR_OPS * (100 + 2 * 8))  # 2 a weight of bf16
    slow = replace(ours, prompt_ops_s=60 * ops / 2)
    bound = script.make_report(windowed, [(load, slow, None)])
    assert "| 2 x 100: decode, tokens/s | 50.0 | 60.0 | 83% | - | - |" in bound
    floor = 100 * 1e9 / windowed.prompt_ops(100)
    assert f"| {200 / floor:.0%} | 100 | 2.00 |" in beside
    assert beside.count("0.50") == 1  # of the resident memory


@pytest.mark.parametrize("text", ["1", "0x5", "2x0"])
def test_a_load_needs_sequences_and_prompts(script: ModuleType, text: str) -> None:
    with pytest.raises(ValueError):
        script.Load.parse(text)


def test_quire_is_measured(
    script: ModuleType,
    windowed: Any,
    tmp_path: Path,
    load_script: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a process of its own does it, with short reads and a small product."""
    load_script("benchmarks.checkpoints.random_weights").write_weights(tmp_path, 1 << 20)
    monkeypatch.setattr(load_script("benchmarks.cpu.experts"), "READ_BYTES", 1 << 20)
    monkeypatch.setattr(script, "RATE_SIZE", 64)
    load = script.Load.parse("2x40")
    found = script.measure(tmp_path, load, 8, 1)
    kept = 2 * windowed.kv_bytes(40)
    assert kept < found.held_bytes < 3 * kept
    assert min(found.prompt_tok_s, found.decode_tok_s, found.decode_share) > 0
    assert found.peak_bytes > windowed.weight_bytes
    assert script.make_report(windowed, [(load, found, None)]).count("\n") == 1 + len(script.TITLES)
