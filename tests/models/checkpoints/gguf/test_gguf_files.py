"""Quantized rows of GGUF files, models in several files, and what is wrong with files together."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gguf_writer import Raw, random_raw, write_gguf

from quire.errors import CheckpointError, UnsupportedModelError
from quire.hub.gguf.storage_types import STORAGE_TYPES
from quire.models.checkpoints.gguf.decoding import numbers
from quire.models.checkpoints.gguf.gguf_files import GGUFFiles
from quire.models.checkpoints.gguf.gguf_model import GGUFModel
from quire.models.checkpoints.loader import load_model
from quire.models.checkpoints.readers import find_reader, open_checkpoint
from quire.models.registry import load_config

H, HEADS, KV_HEADS, DIM, V, F, E = 256, 4, 2, 64, 96, 512, 3
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": H,
    "llama.feed_forward_length": F,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
STORAGE = {storage.name: storage for storage in STORAGE_TYPES.values()}


def decoded(raw: Raw) -> torch.Tensor:
    storage = STORAGE[raw.kind]
    row_bytes = raw.shape[-1] // storage.block_size * storage.block_bytes
    content = torch.frombuffer(bytearray(raw.content), dtype=torch.uint8)
    return numbers(storage, content.view(-1, row_bytes)).view(raw.shape)


def layer(kind: str, other: str = "Q6_K") -> dict[str, Any]:
    shapes = {
        "attn_q": (HEADS * DIM, H),
        "attn_k": (KV_HEADS * DIM, H),
        "attn_v": (KV_HEADS * DIM, H),
        "attn_output": (H, HEADS * DIM),
        "ffn_gate": (F, H),
        "ffn_up": (F, H),
        "ffn_down": (H, F),
    }
    found: dict[str, Any] = {
        f"blk.0.{name}.weight": random_raw(other if name == "attn_v" else kind, shape, seed)
        for seed, (name, shape) in enumerate(shapes.items())
    }
    norms = ("attn_norm", "ffn_norm")
    return found | {f"blk.0.{name}.weight": torch.rand(H) for name in norms}


def ends(kind: str) -> dict[str, Any]:
    return {
        "token_embd.weight": random_raw(kind, (V, H), 7),
        "output_norm.weight": torch.ones(H),
        "output.weight": random_raw("Q6_K", (V, H), 8),
    }


def unpermuted(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """As transformers' own loader of GGUF files does it."""
    pairs = tensor.reshape(num_heads, len(tensor) // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "IQ4_XS", "IQ2_S"])
def test_rows_as_numbers_and_as_codes(kind, tmp_path):
    tensors = layer(kind) | ends(kind)
    files = GGUFFiles(write_gguf(tmp_path / "x.gguf", METADATA, tensors))
    for name, stored, heads in (
        ("self_attn.q_proj", "attn_q", HEADS),
        ("self_attn.k_proj", "attn_k", KV_HEADS),
        ("mlp.down_proj", "ffn_down", 0),
    ):
        name = f"model.layers.0.{name}.weight"
        expected = decoded(tensors[f"blk.0.{stored}.weight"])
        if heads:
            expected = unpermuted(expected, heads)
        assert files.shape(name) == expected.shape and files.dtype(name) == torch.float32
        block_format = files.block_format(name)
        assert (block_format is None) == (kind == "IQ2_S")
        for span in (range(0, len(expected)), range(13, 14), range(30, 101)):
            with files.rows(name, span) as rows:
                assert torch.equal(rows, expected[span.start : span.stop])
            if block_format is not None:
                with files.quantized_rows(name, span) as codes:
                    assert codes.block_format == block_format and len(codes) == len(span)
                    assert torch.equal(codes.numbers(), expected[span.start : span.stop])
        assert files.stored_as(name) == kind
    assert files.block_format("model.norm.weight") is None
    assert files.stored_as("model.norm.weight") is None


def test_stacked_experts_keep_their_codes(tmp_path):
    stacked = random_raw("Q4_K", (E, F, H), 3)
    tensors = layer("Q4_0") | ends("Q4_0") | {"blk.0.ffn_up_exps.weight": stacked}
    files = GGUFFiles(write_gguf(tmp_path / "x.gguf", METADATA, tensors))
    expected = decoded(stacked)
    for expert in range(E):
        name = f"model.layers.0.mlp.experts.{expert}.up_proj.weight"
        assert files.shape(name) == (F, H)
        with files.quantized_rows(name, range(20, 50)) as codes:
            assert torch.equal(codes.numbers(), expected[expert, 20:50])
        with files.rows(name, range(F)) as rows:
            assert torch.equal(rows, expected[expert])


def test_a_quantized_model_is_loaded(tmp_path):
    tensors = layer("Q4_K") | ends("Q8_0")
    path = write_gguf(tmp_path / "x.gguf", METADATA, tensors)
    models = [
        load_model(
            each,
            load_config(each),
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_model_len=64,
        )
        for each in (path, tmp_path)
    ]
    for model in models:
        table = model.state_dict()["model.embed_tokens.weight"]
        assert torch.equal(table, decoded(tensors["token_embd.weight"]))


def test_paths_of_a_file_and_of_its_folder(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", METADATA, layer("Q4_0") | ends("Q4_0"))
    for each in (path, tmp_path):
        assert find_reader(each) is GGUFFiles
        assert open_checkpoint(each).names == GGUFFiles(path).names
        assert load_config(each) == load_config(path)


def test_vectors_may_be_quantized_though_they_are_shorter_than_blocks(tmp_path):
    gains = random_raw("Q8_0", (H,), 5)
    tensors = layer("Q4_0") | ends("Q4_0") | {"output_norm.weight": gains}
    files = GGUFFiles(write_gguf(tmp_path / "x.gguf", METADATA, tensors))
    with files.rows("model.norm.weight", range(3, 40)) as rows:
        assert torch.equal(rows, decoded(gains)[3:40])


def test_tensors_at_odd_bytes_are_read(tmp_path):
    tensors = {"a.weight": torch.ones(3, dtype=torch.bfloat16), "b.weight": torch.arange(5.0)}
    metadata = METADATA | {"general.alignment": 2}
    tensors |= layer("Q4_0")
    files = GGUFFiles(write_gguf(tmp_path / "x.gguf", metadata, tensors, alignment=2))
    with files.rows("b.weight", range(5)) as rows:
        assert torch.equal(rows, torch.arange(5.0))


def write_split(folder: Path, changes: dict[int, dict[str, Any]] | None = None) -> Path:
    """In three files."""
    groups = [ends("Q4_0"), layer("Q4_0"), {"blk.0.extra.weight": torch.ones(2)}]
    total = sum(map(len, groups))
    for number, tensors in enumerate(groups):
        fields = {"split.no": number, "split.count": 3, "split.tensors.count": total}
        metadata = (METADATA if number == 0 else {}) | fields | (changes or {}).get(number, {})
        write_gguf(folder / f"x-{number + 1:05}-of-00003.gguf", metadata, tensors)
    return folder / "x-00001-of-00003.gguf"


def test_a_model_in_several_files(tmp_path):
    path = write_split(tmp_path)
    files = GGUFFiles(path)
    assert {"lm_head.weight", "model.layers.0.mlp.up_proj.weight", "blk.0.extra.weight"} <= (
        files.names
    )
    expected = decoded(layer("Q4_0")["blk.0.ffn_down.weight"])
    with files.rows("model.layers.0.mlp.down_proj.weight", range(9, 90)) as rows:
        assert torch.equal(rows, expected[9:90])
    assert load_config(path) == load_config(tmp_path)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({1: {"split.no": 2}}, "says that it is file 2 of 3"),
        ({0: {"split.count": 2}}, "says that it is file 0 of 2"),
        ({2: {"split.count": 0}}, "says that it is file 2 of 0"),
        ({0: {"split.tensors.count": 99}}, "the model has 99 tensors, but 13 are in its 3 files"),
    ],
)
def test_split_files_of_different_models_are_refused(changes, reason, tmp_path):
    with pytest.raises(CheckpointError, match=reason):
        GGUFModel(write_split(tmp_path, changes))


def test_a_tensor_in_two_files(tmp_path):
    path = write_split(tmp_path)
    metadata = {"split.no": 2, "split.count": 3}
    tensors = {"token_embd.weight": torch.ones(2)}
    write_gguf(tmp_path / "x-00003-of-00003.gguf", metadata, tensors)
    with pytest.raises(CheckpointError, match=r"token_embd.weight is in x-00001-of-00003.gguf as"):
        GGUFModel(path)


def test_one_file_of_a_split_model_under_another_name(tmp_path):
    path = write_split(tmp_path).rename(tmp_path / "y.gguf")
    with pytest.raises(CheckpointError, match="says that it is file 0 of 3"):
        GGUFModel(path)


@pytest.mark.parametrize(
    "metadata, error, reason",
    [
        ({"general.type": "adapter"}, UnsupportedModelError, "holds an adapter"),
        ({"general.type": "mmproj"}, UnsupportedModelError, "holds an image encoder"),
        ({"general.architecture": 3}, CheckpointError, "general.architecture is 3"),
        ({"general.type": [1, 2]}, CheckpointError, "general.type is a list"),
        ({"general.architecture": ["x"]}, CheckpointError, "general.architecture is a list"),
        ({"split.count": [1, 2]}, CheckpointError, "split.count is a list"),
        ({"split.tensors.count": []}, CheckpointError, "split.tensors.count is a list"),
        ({"llama.pooling_type": [1, 2]}, CheckpointError, "llama.pooling_type is a list"),
        ({"llama.block_count": "x"}, CheckpointError, "llama.block_count is 'x', not a count"),
        ({"llama.block_count": -1}, CheckpointError, "llama.block_count is -1, not a count"),
        ({"llama.attention.head_count": [4, 5]}, UnsupportedModelError, "from layer to layer"),
        (
            {"llama.attention.layer_norm_rms_epsilon": True},
            CheckpointError,
            "is True, not a number",
        ),
        ({"llama.rope.scaling.type": "new"}, UnsupportedModelError, "scaling is 'new'"),
        ({"llama.rope.scaling.type": 1}, CheckpointError, "is 1, not a text"),
    ],
)
def test_metadata_that_makes_no_config(metadata, error, reason, tmp_path):
    tensors = layer("Q4_0") | ends("Q4_0")
    path = write_gguf(tmp_path / "x.gguf", METADATA | metadata, tensors)
    with pytest.raises(error, match=reason):
        load_config(path)


def test_missing_metadata_is_named(tmp_path):
    metadata = {name: value for name, value in METADATA.items() if "context" not in name}
    path = write_gguf(tmp_path / "x.gguf", metadata, layer("Q4_0") | ends("Q4_0"))
    with pytest.raises(CheckpointError, match=r"has no metadata field llama\.context_length"):
        load_config(path)
    path = write_gguf(tmp_path / "x.gguf", METADATA, layer("Q4_0"))
    with pytest.raises(CheckpointError, match=r"has no tensor token_embd\.weight"):
        load_config(path)


@pytest.mark.parametrize("shape", [(HEADS * DIM - 30, H), (1, H)])
def test_a_tensor_that_is_not_as_the_metadata_says(shape, tmp_path):
    tensors = layer("Q4_0") | ends("Q4_0")
    for name in ("attn_k", "attn_q"):
        wrong = tensors | {f"blk.0.{name}.weight": random_raw("Q4_0", shape, 1)}
        path = write_gguf(tmp_path / "x.gguf", METADATA, wrong)
        with pytest.raises(CheckpointError, match=rf"{name}\.weight has the shape"):
            GGUFFiles(path)


@pytest.mark.parametrize("count", [0, 3, 10**9, 2**32 - 1])
def test_head_count_that_contradicts_tensor_shapes_is_refused(count, tmp_path):
    metadata = METADATA | {"llama.attention.head_count": count}
    path = write_gguf(tmp_path / "x.gguf", metadata, layer("Q4_0") | ends("Q4_0"))
    with pytest.raises(CheckpointError, match=r"attn_q\.weight has the shape"):
        GGUFFiles(path)


def test_a_billion_layers(tmp_path):
    metadata = METADATA | {"llama.block_count": 10**9}
    path = write_gguf(tmp_path / "x.gguf", metadata, layer("Q4_0") | ends("Q4_0"))
    with pytest.raises(CheckpointError, match="would have 1000000000 layers, but has 12 tensors"):
        load_config(path)


@pytest.mark.parametrize("parameter", ["scale", "input_scale"])
def test_scales_of_whole_tensors_are_refused_by_name(parameter, tmp_path):
    tensors = layer("NVFP4") | ends("Q4_0") | {f"blk.0.attn_q.{parameter}": torch.ones(1)}
    path = write_gguf(tmp_path / "x.gguf", METADATA, tensors)
    with pytest.raises(UnsupportedModelError, match=rf"NVFP4 have scales .*attn_q\.{parameter}"):
        GGUFFiles(path)


def test_thousands_of_experts_are_refused(tmp_path):
    tensors = layer("Q4_0") | ends("Q4_0")
    tensors |= {"blk.0.ffn_up_exps.weight": random_raw("Q4_0", (100_000, 1, 32), 1)}
    path = write_gguf(tmp_path / "x.gguf", METADATA, tensors)
    with pytest.raises(CheckpointError, match=r"ffn_up_exps\.weight has the shape"):
        GGUFFiles(path)


def test_types_that_are_no_plain_numbers_are_named(tmp_path):
    plain = {
        name: torch.rand(raw.shape) if isinstance(raw, Raw) else raw
        for name, raw in ends("Q8_0").items()
    }
    path = write_gguf(tmp_path / "x.gguf", METADATA, layer("Q4_K") | ends("Q8_0"))
    assert GGUFFiles.quantized_by(path) == "GGUF's types (Q4_K, Q6_K, Q8_0)"
    quantized = load_config(path).quantized
    assert quantized is not None and quantized.method == GGUFFiles.quantized_by(path)
    assert GGUFFiles.quantized_by(write_gguf(tmp_path / "y.gguf", METADATA, plain)) is None
