"""Which linears an adapter fits, of fused ones which part, and what is refused by name."""

import pytest
import torch
import transformers
from tests.adapters.peft_folders import random_pairs
from tests.models.family_shapes import FAMILIES

from quire.adapters.adapter import LoRAAdapter, LoRAWeights
from quire.adapters.targets import AdapterTargets
from quire.errors import AdapterError, ConfigurationError
from quire.models.checkpoints.loader import load_model
from quire.models.registry import load_config

CPU = torch.device("cpu")
PLAIN, HIDDEN, INNER = "model.layers.0.", 64, 96


def adapter_of(sizes, layers: tuple[int, ...] = ()) -> LoRAAdapter:
    pairs = random_pairs(sizes, 3)
    return LoRAAdapter(
        "test", {path: LoRAWeights(*pair, 2.0) for path, pair in pairs.items()}, layers
    )


@pytest.fixture
def targets_of(save_checkpoint, load):
    def make(family: str) -> AdapterTargets:
        config_class, fields = FAMILIES[family]
        folder, _ = save_checkpoint(getattr(transformers, config_class), base=fields)
        return AdapterTargets(load(folder), load_config(folder))

    return make


def test_parts_of_fused_linears_have_adapters_of_their_own(targets_of) -> None:
    adapter = adapter_of(
        {f"{PLAIN}self_attn.v_proj": (HIDDEN, 48), f"{PLAIN}mlp.gate_proj": (HIDDEN, INNER)}
    )
    found = targets_of("llama").resolve(adapter)
    assert found.keys() == {f"{PLAIN}self_attn.qkv_proj", f"{PLAIN}mlp.gate_up_proj"}
    q, k, v = found[f"{PLAIN}self_attn.qkv_proj"]
    assert q is None and k is None
    assert torch.equal(v.b, adapter.weights[f"{PLAIN}self_attn.v_proj"].b) and v.scaling == 2.0
    assert found[f"{PLAIN}mlp.gate_up_proj"][1] is None


def test_a_fused_linear_of_the_files_is_taken_apart(targets_of) -> None:
    path = f"{PLAIN}self_attn.qkv_proj"
    adapter = adapter_of({path: (HIDDEN, 192)})
    (parts,) = targets_of("phi3").resolve(adapter).values()
    assert torch.equal(torch.cat([part.b for part in parts]), adapter.weights[path].b)
    assert all(torch.equal(part.a, adapter.weights[path].a) for part in parts)


def test_outputs_are_ordered_as_the_models_are(targets_of) -> None:
    path = f"{PLAIN}self_attn.q_proj"
    adapter = adapter_of({path: (HIDDEN, 96)})
    (parts,) = targets_of("glm").resolve(adapter).values()
    assert not torch.equal(parts[0].b, adapter.weights[path].b)
    assert torch.equal(parts[0].b.sort(0).values, adapter.weights[path].b.sort(0).values)


def test_heads_of_latents_have_their_own_rows_of_b(targets_of) -> None:
    """Each of the 4 heads has 20 rows for its keys, which are wanted transposed, and 28 for its
    values."""
    path = f"{PLAIN}self_attn.kv_b_proj"
    adapter = adapter_of({path: (40, 192)})
    weights = adapter.weights[path]
    found = targets_of("deepseek_v3").resolve(adapter)
    assert len(found) == 8
    for head, rows in enumerate(weights.b.split(48)):
        (key,) = found[f"{PLAIN}self_attn.k_up.{head}"]
        (value,) = found[f"{PLAIN}self_attn.v_up.{head}"]
        assert torch.equal(key.a, rows[:20].T) and torch.equal(key.b, weights.a.T)
        assert torch.equal(value.a, weights.a) and torch.equal(value.b, rows[20:])
        assert key.scaling == value.scaling == 2.0


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_names_of_a_multimodal_model_are_those_of_its_language_model(
    targets_of, family: str, prefix: str
) -> None:
    paths = [f"layers.{layer}.mlp.up_proj" for layer in (0, 2)]
    plain = adapter_of({f"model.{path}": (HIDDEN, INNER) for path in paths})
    wrapped = adapter_of({prefix + path: (HIDDEN, INNER) for path in paths})
    targets = targets_of(family)
    expected, found = targets.resolve(plain), targets.resolve(wrapped)
    assert found.keys() == expected.keys() and len(found) == 2
    for path, (_, up) in found.items():
        assert torch.equal(up.b, expected[path][1].b)
    assert all(targets.uses(path) for path in wrapped.weights)


def test_adapter_with_too_many_outputs_is_refused_at_once(targets_of) -> None:
    b = torch.empty(1 << 40, 3, device="meta")
    pair = LoRAWeights(torch.empty(3, HIDDEN, device="meta"), b, 1.0)
    with pytest.raises(AdapterError, match="1 linears with 1099511627776 outputs are more than"):
        targets_of("llama").resolve(LoRAAdapter("test", {f"{PLAIN}mlp.up_proj": pair}))


UNKNOWN = {
    "no such layer": ("llama", "model.layers.3.mlp.up_proj", (HIDDEN, INNER), "has no linear"),
    "no such name": ("llama", f"{PLAIN}mlp.router", (HIDDEN, INNER), "has no linear"),
    "a norm": ("llama", f"{PLAIN}input_layernorm", (1, HIDDEN), "has no linear"),
    "the fused name": ("llama", f"{PLAIN}self_attn.qkv_proj", (HIDDEN, 192), "has no linear"),
    "the head": ("llama", "lm_head", (HIDDEN, 1013), "adapters of heads"),
    "embeddings": ("llama", "model.embed_tokens", (1013, HIDDEN), "has no linear"),
    "inputs": ("llama", f"{PLAIN}mlp.up_proj", (65, INNER), "has 64 inputs and 96 outputs"),
    "outputs": ("llama", f"{PLAIN}mlp.up_proj", (HIDDEN, 95), "has 64 inputs and 96 outputs"),
    "fused outputs": ("phi3", f"{PLAIN}self_attn.qkv_proj", (HIDDEN, 90), "does not fit the model"),
    "experts": ("olmoe", f"{PLAIN}mlp.experts.0.up_proj", (HIDDEN, INNER), "of experts are not"),
    "latents": (
        "deepseek_v3",
        f"{PLAIN}self_attn.kv_b_proj",
        (41, 192),
        "has 40 inputs and 20 out",
    ),
    "heads": ("deepseek_v3", f"{PLAIN}self_attn.kv_b_proj", (40, 191), "does not fit the model"),
    "convolution": ("falcon_h1", f"{PLAIN}mamba.conv1d", (4, 176), "has no linear"),
}


@pytest.mark.parametrize(
    ("family", "path", "sizes", "message"), UNKNOWN.values(), ids=UNKNOWN.keys()
)
def test_adapters_that_do_not_fit_the_model_are_refused(
    targets_of, family, path, sizes, message
) -> None:
    with pytest.raises(AdapterError, match=message) as raised:
        targets_of(family).resolve(adapter_of({path: sizes}))
    assert "adapter test: " in str(raised.value)


def test_adapter_of_a_missing_layer_is_refused(targets_of) -> None:
    with pytest.raises(AdapterError, match="layer 3, but the model has layers 0 to 2"):
        targets_of("llama").resolve(adapter_of({f"{PLAIN}mlp.up_proj": (HIDDEN, INNER)}, (0, 3)))


def test_two_names_of_one_linear_are_refused(targets_of) -> None:
    sizes = {f"{prefix}h.0.mlp.c_fc": (48, 100) for prefix in ("", "transformer.")}
    with pytest.raises(AdapterError, match="does not fit the model"):
        targets_of("gpt2").resolve(adapter_of(sizes))


def test_classes_of_transformers_are_refused(save_checkpoint) -> None:
    config_class, fields = FAMILIES["llama"]
    folder, _ = save_checkpoint(getattr(transformers, config_class), base=fields)
    config = load_config(folder, from_transformers=True)
    model = load_model(folder, config, dtype=torch.float32, device=CPU, max_model_len=48)
    with pytest.raises(ConfigurationError, match="enable_lora is set, but a class of transformers"):
        AdapterTargets(model, config)
