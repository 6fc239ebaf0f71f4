"""Adapters by Triton kernels, in the interpreter: merged weights, base rows, captured steps."""

import pytest
import torch
import transformers

pytest.importorskip("triton")

from tests.adapters.peft_folders import merge, random_pairs, sizes_of
from tests.models.family_shapes import FAMILIES

from quire.adapters.adapter import LoRAAdapter, LoRAWeights
from quire.adapters.linear_slots import SlotLimits
from quire.adapters.slots import AdapterSlots, slots_bytes
from quire.adapters.triton_slots import TritonAdapterKernels
from quire.formats.dense import DenseMethod
from quire.layers.linear import Linear
from quire.layers.sharded import LinearMethods
from quire.models.checkpoints.loader import blueprint
from quire.models.registry import find_entry, load_config

CPU = torch.device("cpu")
LIMITS = SlotLimits(max_loras=3, max_rank=20)
NUM_TOKENS = 12


def all_of(slot: int) -> torch.Tensor:
    return torch.full((NUM_TOKENS,), slot, dtype=torch.int32)


@pytest.mark.parametrize(
    ("family", "captures"),
    [("llama", False), ("llama", True), ("falcon_h1", True), ("deepseek_v3, dense", False)],
)
def test_the_results_are_those_of_merged_weights(
    family, captures, save_checkpoint, load, run
) -> None:
    config_class, fields = FAMILIES[family]
    folder, reference = save_checkpoint(getattr(transformers, config_class), base=fields)
    model, config = load(folder), load_config(folder)
    token_ids = torch.randint(0, model.vocab_size, (NUM_TOKENS,))
    plain = run(model, token_ids, [NUM_TOKENS])
    kernels = TritonAdapterKernels(CPU, NUM_TOKENS, captures=captures)
    slots = AdapterSlots(model, config, LIMITS, kernels, torch.float32)
    for slot, rank in ((0, 20), (2, 20), (2, 5)):
        pairs = random_pairs(sizes_of(reference), rank, seed=rank)
        weights = {path: LoRAWeights(*pair, 0.7) for path, pair in pairs.items()}
        slots.load(slot, LoRAAdapter("test", weights))
    slots.set_rows(all_of(-1))
    assert torch.equal(run(model, token_ids, [NUM_TOKENS]), plain), "base rows keep their bits"
    slots.set_rows(all_of(2))

    logits = run(model, token_ids, [NUM_TOKENS])

    with torch.inference_mode():
        merge(reference, pairs, 0.7)
        expected = reference(token_ids[None]).logits[0]
    assert (expected - plain).abs().max() > 0.1, "the adapter changes nothing"
    scale = max(1.0, expected.std().item())
    torch.testing.assert_close(logits, expected, atol=1e-4 * scale, rtol=1e-4)
    slots.clear(2)
    assert torch.equal(run(model, token_ids, [NUM_TOKENS]), plain)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_slots_bytes_predicts_the_allocated_size(family, save_checkpoint, load) -> None:
    config_class, fields = FAMILIES[family]
    folder, _ = save_checkpoint(getattr(transformers, config_class), base=fields)
    model, config = load(folder), load_config(folder)
    whole = blueprint(config, find_entry(config), LinearMethods(DenseMethod()))
    kernels = TritonAdapterKernels(CPU, NUM_TOKENS, captures=False)
    expected = slots_bytes(whole, config, LIMITS, kernels, torch.float32)
    assert AdapterSlots(model, config, LIMITS, kernels, torch.float32).num_bytes == expected
    held = {}
    for module in model.modules():
        if isinstance(module, Linear) and module.adapter is not None:
            weights = module.adapter._weights
            for each in (weights.a, weights.b, weights.ranks, weights.scales):
                held[each.data_ptr()] = each.nbytes  # heads of latents share some
    assert sum(held.values()) == expected
