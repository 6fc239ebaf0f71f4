"""Adapters on linears of the native kernels: merged weights, crowds, and the bits of base rows."""

import pytest
import torch
import transformers
from tests.adapters.peft_folders import merge, random_pairs, sizes_of
from tests.models.conftest import kernels
from tests.models.family_shapes import FAMILIES

from quire.adapters.adapter import LoRAAdapter, LoRAWeights
from quire.adapters.linear_slots import SlotLimits
from quire.adapters.native_slots import NativeAdapterKernels
from quire.adapters.slots import AdapterSlots, slots_bytes
from quire.formats.dense import DenseMethod
from quire.formats.packed import PackedMethod
from quire.kernels.cpu.abi import AttentionLayer
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.cpu.recorded_values import UnrecordableError
from quire.kernels.cpu.recorder import Recorder
from quire.layers.linear import Linear
from quire.layers.operator_module import recorded_by
from quire.layers.sharded import LinearMethods
from quire.models.checkpoints.loader import blueprint, load_model
from quire.models.interface import CausalLM
from quire.models.registry import find_entry, load_config

__all__ = ["kernels"]

CPU = torch.device("cpu")
LIMITS = SlotLimits(max_loras=9, max_rank=256)
RANKS = (16, 1, 256, 8, 17, 64, 3, 32)
NUM_TOKENS = 24


def all_of(slot: int, count: int = NUM_TOKENS) -> torch.Tensor:
    return torch.full((count,), slot, dtype=torch.int32)


def adapter_of(reference, rank: int, pattern: str = "") -> LoRAAdapter:
    pairs = random_pairs(sizes_of(reference, pattern), rank, seed=rank)
    return LoRAAdapter(
        f"rank {rank}", {path: LoRAWeights(*pair, rank**-0.5) for path, pair in pairs.items()}
    )


@pytest.fixture
def make(save_checkpoint, kernels: NativeKernels):
    """make(family) -> (model with native linears, its config, the reference in transformers)"""

    def made(family: str, dtype: torch.dtype = torch.float32):
        config_class, fields = FAMILIES[family]
        folder, reference = save_checkpoint(getattr(transformers, config_class), base=fields)
        config = load_config(folder)
        where = {"dtype": dtype, "device": CPU, "max_model_len": 48}
        model = load_model(folder, config, methods=LinearMethods(PackedMethod(kernels)), **where)
        return model, config, reference

    return made


def logits_of(run, slots: AdapterSlots, model: CausalLM, token_ids, slot: int) -> torch.Tensor:
    slots.set_rows(all_of(slot, len(token_ids)))
    return run(model, token_ids, [len(token_ids)])


@pytest.mark.parametrize(
    "family", ["llama", "phi3", "gpt2", "qwen3_next", "falcon_h1", "deepseek_v3"]
)
def test_the_results_are_those_of_merged_weights(family, make, run) -> None:
    model, config, reference = make(family)
    slots = AdapterSlots(model, config, LIMITS, NativeAdapterKernels(), torch.float32)
    adapter = adapter_of(reference, 6)
    slots.load(3, adapter)
    token_ids = torch.randint(0, model.vocab_size, (NUM_TOKENS,))
    plain = logits_of(run, slots, model, token_ids, -1)

    logits = logits_of(run, slots, model, token_ids, 3)

    with torch.inference_mode():
        merge(reference, {path: (w.a, w.b) for path, w in adapter.weights.items()}, 6**-0.5)
        expected = reference(token_ids[None]).logits[0]
    assert (expected - plain).abs().max() > 0.1, "the adapter changes nothing"
    scale = max(1.0, expected.std().item())
    torch.testing.assert_close(logits, expected, atol=1e-4 * scale, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_linear_has_the_same_bits_in_a_crowd(make, family, dtype: torch.dtype) -> None:
    """Each row alone, and among rows of eight adapters and of none, in two places."""
    model, config, reference = make(family, dtype)
    linears = [each for each in model.modules() if isinstance(each, Linear) and not each.gated]
    inputs = [torch.randn(20, linear.input_size).to(dtype) for linear in linears]
    plain = [linear(x) for linear, x in zip(linears, inputs, strict=True)]
    slots = AdapterSlots(model, config, LIMITS, NativeAdapterKernels(), dtype)
    patterns = ("", "q_proj|v_proj|kv_b_proj", "in_proj|o_proj", "")
    for slot, rank in enumerate(RANKS):
        slots.load(slot, adapter_of(reference, rank, patterns[slot % 4]))
    rows = [slot % 9 - 1 for slot in range(20)]
    alone: list[list[torch.Tensor]] = [[] for _ in linears]
    for row, slot in enumerate(rows):
        slots.set_rows(all_of(slot, 1))
        for found, linear, x in zip(alone, linears, inputs, strict=True):
            found.append(linear(x[row : row + 1]))
    slots.set_rows(torch.tensor(rows, dtype=torch.int32))
    num_changed = 0
    for found, linear, x, before in zip(alone, linears, inputs, plain, strict=True):
        if linear.packed_adapters is None:
            continue
        crowd = linear(x)
        assert torch.equal(crowd, torch.cat(found))
        base = [row for row, slot in enumerate(rows) if slot < 0]
        assert torch.equal(crowd[base], before[base])
        num_changed += not torch.equal(crowd, before)
    assert num_changed > 10


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_slots_bytes_predicts_the_allocated_size(make, family) -> None:
    model, config, _ = make(family)
    whole = blueprint(config, find_entry(config), LinearMethods(DenseMethod()))
    expected = slots_bytes(whole, config, LIMITS, NativeAdapterKernels(), torch.float32)
    slots = AdapterSlots(model, config, LIMITS, NativeAdapterKernels(), torch.float32)
    held = [each.packed_adapters for each in model.modules() if isinstance(each, Linear)]
    assert slots.num_bytes == expected == sum(each.num_bytes for each in held if each)


def test_linears_of_torch_have_torchs_slots(make, run, kernels: NativeKernels) -> None:
    model, config, reference = make("llama")
    token_ids = torch.arange(NUM_TOKENS)
    expected = []
    for is_packed in (True, False):
        slots = AdapterSlots(model, config, LIMITS, NativeAdapterKernels(), torch.float32)
        slots.load(0, adapter_of(reference, 4))
        expected.append(logits_of(run, slots, model, token_ids, 0))
        if is_packed:
            linear = model.get_submodule("model.layers.1.mlp.down_proj")
            weight = linear.state.weights.unpack(torch.arange(linear.output_size))
            linear.packed_adapters = None
            linear.use(DenseMethod(), torch.float32, CPU)
            linear.slots()["weight", 0].load(0, weight)
    assert linear.adapter is not None
    torch.testing.assert_close(*expected, atol=1e-4, rtol=1e-4)
    layers = (AttentionLayer * 3)()
    recorder = Recorder(kernels, torch.float32, NUM_TOKENS, layers)
    with pytest.raises(UnrecordableError, match="torch adds"), recorded_by(recorder, model):
        pass
