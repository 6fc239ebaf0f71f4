"""What is read of PEFT's folders, how it is scaled, and what is refused by name."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.adapters.peft_folders import random_pairs, save_peft

from quire.adapters import peft_folder
from quire.adapters.adapter import LoRAAdapter
from quire.adapters.peft_folder import read_adapter
from quire.errors import AdapterError

Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"
SIZES = {Q: (12, 20), UP: (12, 30)}


def folder_of(tmp_path: Path, rank: int = 4, **fields) -> Path:
    return save_peft(tmp_path / "lora", random_pairs(SIZES, rank), **fields)


def with_tensors(folder: Path, added: dict[str, torch.Tensor], *removed: str) -> Path:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path) | added
    save_file({name: tensors[name] for name in tensors if name not in removed}, path)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_are_read_as_they_are_stored(tmp_path: Path, dtype: torch.dtype) -> None:
    pairs = random_pairs(SIZES, 4, dtype=dtype)
    adapter = read_adapter(save_peft(tmp_path / "lora", pairs), 4)
    assert adapter.weights.keys() == pairs.keys()
    for path, (a, b) in pairs.items():
        assert torch.equal(adapter.weights[path].a, a) and adapter.weights[path].a.dtype == dtype
        assert torch.equal(adapter.weights[path].b, b)
    assert {each.rank for each in adapter.weights.values()} == {4}
    assert adapter.num_bytes == 4 * (12 + 20 + 12 + 30) * dtype.itemsize


SCALINGS = {
    "alpha": ({"lora_alpha": 6}, 1.5, 1.5),
    "a fraction": ({"lora_alpha": 0.5}, 0.125, 0.125),
    "rsLoRA": ({"lora_alpha": 6, "use_rslora": True}, 3.0, 3.0),
    "by name": ({"lora_alpha": 6, "alpha_pattern": {"up_proj": 2}}, 1.5, 0.5),
    "by layer": ({"lora_alpha": 6, "alpha_pattern": {r"layers\.1\..*proj": 10}}, 1.5, 2.5),
    "no part of a word": ({"lora_alpha": 6, "alpha_pattern": {"p_proj": 2}}, 1.5, 1.5),
}


@pytest.mark.parametrize(("fields", "q", "up"), SCALINGS.values(), ids=SCALINGS.keys())
def test_scaling(tmp_path: Path, fields, q: float, up: float) -> None:
    weights = read_adapter(folder_of(tmp_path, **fields), 4).weights
    assert (weights[Q].scaling, weights[UP].scaling) == (q, up)


def test_ranks_by_name(tmp_path: Path) -> None:
    pairs = random_pairs({Q: SIZES[Q]}, 4) | random_pairs({UP: SIZES[UP]}, 9)
    fields = {"r": 4, "rank_pattern": {"up_proj": 9}, "lora_alpha": 18, "use_rslora": True}
    adapter = read_adapter(save_peft(tmp_path / "lora", pairs, **fields), 9)
    assert [each.rank for each in adapter.weights.values()] == [4, 9]
    assert adapter.weights[UP].scaling == 18 / math.sqrt(9)


def test_fields_of_training_are_passed_over(tmp_path: Path) -> None:
    fields = {"lora_dropout": 0.1, "fan_in_fan_out": True, "base_model_name_or_path": "x/y"}
    assert read_adapter(folder_of(tmp_path, **fields, layers_to_transform=[0, 1]), 4).layers == (
        0,
        1,
    )


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    pairs = random_pairs(SIZES, 4)
    digest = read_adapter(save_peft(tmp_path / "a", pairs), 4).digest
    turned = dict(reversed(pairs.items()))
    assert read_adapter(save_peft(tmp_path / "b", turned, lora_dropout=0.5), 64).digest == digest
    others = [
        save_peft(tmp_path / "c", pairs, lora_alpha=5),
        save_peft(tmp_path / "d", random_pairs(SIZES, 4, seed=1)),
        save_peft(tmp_path / "e", {Q: pairs[Q]}),
    ]
    digests = {read_adapter(each, 4).digest for each in others} | {digest}
    assert len(digests) == 4


FIELDS = {
    "peft_type": ({"peft_type": "LOHA"}, "peft_type is 'LOHA', but must be LORA"),
    "DoRA": ({"use_dora": True}, "use_dora is True, which is not served: DoRA scales"),
    "modules": ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
    "bias": ({"bias": "lora_only"}, "bias is 'lora_only', which is not served"),
    "bias of B": ({"lora_bias": True}, "lora_bias is True"),
    "experts": ({"target_parameters": ["mlp.experts.down_proj"]}, "as stacked experts do"),
    "tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    "invocation": ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    "begin": ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is 'pissa_niter_16'"),
    "begin, as PEFT lowers it": ({"init_lora_weights": "OLoRA"}, "init_lora_weights is 'OLoRA'"),
    "unknown": ({"use_sorcery": True}, "use_sorcery is True, which is not understood"),
    "no r": ({"r": None}, "r is None, but must be a whole number above 0"),
    "alpha": ({"lora_alpha": "x"}, "lora_alpha is 'x', but must be a finite number"),
    "pattern": ({"rank_pattern": {"(": 3}}, r"'\(' is no regular expression"),
    "pattern that never ends": ({"rank_pattern": {"(([a-z0-9._])*)*!": 8}, "r": 5}, "says rank 5"),
    "pattern of two groups": ({"alpha_pattern": {r"(.)\1": 8}}, "a reference to a group, which is"),
    "pattern's value": ({"rank_pattern": {"q": -3}}, "rank_pattern of q is -3"),
    "patterns": ({"alpha_pattern": [3]}, r"alpha_pattern is \[3\], but must be an object"),
    "layers": ({"layers_to_transform": ["a"]}, "must be numbers of layers"),
}


@pytest.mark.parametrize(("fields", "message"), FIELDS.values(), ids=FIELDS.keys())
def test_fields_that_are_refused(tmp_path: Path, fields, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        read_adapter(folder_of(tmp_path, **fields), 4)


def test_disabled_fields_of_an_adapter_are_accepted(tmp_path: Path) -> None:
    fields = {"use_sorcery": False, "trainable_token_indices": None, "layer_replication": None}
    weights = read_adapter(folder_of(tmp_path, **fields), 4).weights
    assert {each.rank for each in weights.values()} == {4}


A_OF_Q, B_OF_Q = (f"base_model.model.{Q}.lora_{side}.weight" for side in "AB")
TENSORS = {
    "embedding": ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 9)},
                  (), "embed_tokens.lora_embedding_A: it adapts an embedding"),
    "DoRA": ({f"base_model.model.{Q}.lora_magnitude_vector": torch.ones(20)}, (), "is DoRA's"),
    "bias": ({f"base_model.model.{Q}.lora_B.bias": torch.ones(20)}, (), "B has a bias"),
    "weight": ({"base_model.model.lm_head.weight": torch.ones(2, 2)}, (), "neither A nor B"),
    "lone": ({}, (B_OF_Q,), "q_proj has only one of the tensors A and B"),
    "NaN": ({A_OF_Q: torch.full((4, 12), torch.nan)}, (), "q_proj hold infinite numbers or NaN"),
    "infinite": ({B_OF_Q: torch.full((20, 4), torch.inf)}, (), "infinite numbers or NaN"),
    "rank": ({B_OF_Q: torch.ones(20, 5)}, (), r"A is \[4, 12\] and B \[20, 5\]"),
    "dimensions": ({A_OF_Q: torch.ones(4, 12, 1, 1)}, (), "a linear's has two dimensions"),
    "empty": ({A_OF_Q: torch.ones(4, 0)}, (), "neither is 0"),
    "dtype": ({A_OF_Q: torch.ones(4, 12).to(torch.int8)}, (), "is stored as I8, but only"),
    "twice": ({A_OF_Q.replace("_A.", "_A.default."): torch.ones(4, 12)}, (), "two tensors A"),
    "nothing": ({}, (A_OF_Q, B_OF_Q, A_OF_Q.replace(Q, UP), B_OF_Q.replace(Q, UP)), "no tensors"),
}  # fmt: skip


@pytest.mark.parametrize(("added", "removed", "message"), TENSORS.values(), ids=TENSORS.keys())
def test_tensors_that_are_refused(tmp_path: Path, added, removed, message: str) -> None:
    folder = with_tensors(folder_of(tmp_path), added, *removed)
    with pytest.raises(AdapterError, match=message) as raised:
        read_adapter(folder, 4)
    assert str(folder) in str(raised.value)


def test_ranks_above_the_limit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="rank 4, above max_lora_rank, 3; raise that option"):
        read_adapter(folder_of(tmp_path), 3)


def test_another_rank_than_the_configs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="says rank 5"):
        read_adapter(folder_of(tmp_path, r=5), 8)


def test_folders_that_are_not_whole(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="it is not a folder"):
        read_adapter(tmp_path / "none", 4)
    folder = folder_of(tmp_path)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    content = weights.read_bytes()
    for size in (0, 5, 100, len(content) - 1):
        weights.write_bytes(content[:size])
        with pytest.raises(AdapterError, match="is not a whole safetensors file"):
            read_adapter(folder, 4)
    weights.unlink()
    with pytest.raises(AdapterError, match="has no adapter_model"):
        read_adapter(folder, 4)
    (folder / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(AdapterError, match=r"a pickle, adapter_model\.bin"):
        read_adapter(folder, 4)
    weights.write_bytes(content)
    for text in ("[]", "{", json.dumps("x")):
        config.write_text(text)
        with pytest.raises(AdapterError, match=r"adapter_config\.json"):
            read_adapter(folder, 4)
    config.unlink()
    with pytest.raises(AdapterError, match="has no adapter_config"):
        read_adapter(folder, 4)
    os.mkfifo(config)  # which nobody writes to
    with pytest.raises(AdapterError, match="has no adapter_config"):
        read_adapter(folder, 4)


class OtherModel:
    """Uses no linear of a vision tower; no adapter fits."""

    def uses(self, path: str) -> bool:
        return not path.startswith("vision.")

    def check_shapes(self, adapter: LoRAAdapter) -> None:
        shapes = {path: (each.a.shape, each.b.shape) for path, each in adapter.weights.items()}
        raise AdapterError(f"it has none of {shapes}, {adapter.layers}")


def test_no_tensor_is_read_before_its_shape_was_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peft_folder, "_read_tensor", None)
    sizes = {Q: SIZES[Q], "vision.q_proj": (4, 5)}
    folder = save_peft(tmp_path / "lora", random_pairs(sizes, 4), layers_to_transform=1)
    with pytest.raises(AdapterError) as raised:
        read_adapter(folder, 4, OtherModel())
    shapes = {Q: (torch.Size([4, 12]), torch.Size([20, 4]))}
    assert str(raised.value) == f"it has none of {shapes}, (1,)"


def test_an_adapter_of_parts_that_are_not_served_alone_is_refused(tmp_path: Path) -> None:
    folder = save_peft(tmp_path / "lora", random_pairs({"vision.q_proj": (4, 5)}, 4))
    with pytest.raises(AdapterError, match="has no tensors of the language model"):
        read_adapter(folder, 4, OtherModel())


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_files_that_are_too_large_are_not_read(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path)
    os.truncate(folder / name, 1 << 40)
    with pytest.raises(AdapterError, match=f"{name} has more than .* bytes, too many for an"):
        read_adapter(folder, 4)
