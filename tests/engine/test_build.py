"""Sizes, dtypes and options that the composition root decides on."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.engine.build import build_engine
from quire.errors import ConfigurationError, InsufficientMemoryError, UnsupportedModelError
from quire.models.hub import EMBEDDED_MODEL

# The embedded model: 4 layers x (K, V) x 2 heads x 64 x 16 tokens.
ELEMENTS_PER_BLOCK = 4 * 2 * 2 * 64 * 16


def num_blocks(**options: object) -> int:
    return build_engine(options).stats().num_blocks


def test_memory_becomes_blocks() -> None:
    assert num_blocks(dtype="float32", kv_cache_memory="64MiB") == 2**26 // (ELEMENTS_PER_BLOCK * 4)
    assert num_blocks(dtype="bfloat16", kv_cache_memory_bytes=2**26) == 2**26 // (
        ELEMENTS_PER_BLOCK * 2
    )
    assert num_blocks(dtype="float32", kv_cache_memory=2**26, block_size=64) == 2**26 // (
        ELEMENTS_PER_BLOCK * 4 * 4
    )
    assert num_blocks(num_blocks=300) == 300


def test_default_memory_is_what_full_length_sequences_need() -> None:
    assert num_blocks(max_num_seqs=2, max_model_len=1000) == 2 * 63


def test_a_share_of_the_machines_memory() -> None:
    small = num_blocks(dtype="float32", gpu_memory_utilization=0.05)
    large = num_blocks(dtype="float32", gpu_memory_utilization=0.1)
    assert small < large < 2.2 * small


def test_max_model_len_follows_the_pool_unless_it_was_asked_for() -> None:
    assert build_engine({"num_blocks": 10}).limits.max_model_len == 160
    assert build_engine({"num_blocks": 1000}).limits.max_model_len == 4096
    with pytest.raises(InsufficientMemoryError, match=r"hold 160 tokens.*max_model_len is 200"):
        build_engine({"num_blocks": 10, "max_model_len": 200})
    with pytest.raises(ConfigurationError, match=r"5000.*at most 4096"):
        build_engine({"max_model_len": 5000})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_memory": 1000}, "kv_cache_memory=1000 leaves no room for one KV block"),
        ({"kv_cache_memory": "1000TiB"}, "the machine has"),
        ({"num_blocks": 10**9}, "the machine has"),
        ({"gpu_memory_utilization": 1e-9}, "leaves no room"),
    ],
)
def test_impossible_memory(options: dict[str, object], message: str) -> None:
    with pytest.raises(InsufficientMemoryError, match=message):
        build_engine(options)


def test_window_layers_form_groups_of_equal_pages(tmp_path: Path) -> None:
    from tests.engine.checkpoints import save_checkpoint  # transformers takes a while to import

    engine = build_engine({"model": str(save_checkpoint("qwen2", tmp_path)), "num_blocks": 60})
    groups = engine.scheduler.memory.config.groups
    assert sorted(group.layers for group in groups) == [(0,), (1,), (2,)]
    assert [group.window for group in groups] == [None, 24, 24]
    assert len({group.bytes_per_block for group in groups}) == 1


def test_end_tokens_come_from_the_generation_config() -> None:
    assert build_engine({"num_blocks": 10}).limits.end_token_ids == (2, 0)


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchModel"]}))
    with pytest.raises(UnsupportedModelError, match=r"NoSuchModel.*LlamaForCausalLM"):
        build_engine({"model": str(folder)})


def test_float16_is_computed_as_asked() -> None:
    engine = build_engine({"dtype": "float16", "max_model_len": 64, "num_blocks": 4})
    torch.set_num_threads(1)
    engine.add(Request("a", [5, 6, 7], DecodingParams(max_tokens=3, temperature=0.0)))
    tokens = [output.token_ids for _ in range(3) for output in engine.step()]
    assert len(tokens) == 3 and not engine.has_work()
