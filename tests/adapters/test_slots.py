"""Slots: filled, emptied and filled anew; rows of several adapters beside rows of none."""

import pytest
import torch
import transformers
from tests.adapters.peft_folders import random_pairs, sizes_of
from tests.models.family_shapes import FAMILIES

from quire.adapters.adapter import LoRAAdapter, LoRAWeights
from quire.adapters.linear_slots import SlotLimits, TorchAdapterKernels
from quire.adapters.slots import AdapterSlots, slots_bytes
from quire.errors import AdapterError
from quire.formats.dense import DenseMethod
from quire.layers.linear import Linear
from quire.layers.sharded import LinearMethods
from quire.models.checkpoints.loader import blueprint
from quire.models.registry import find_entry, load_config

CPU = torch.device("cpu")
LIMITS = SlotLimits(max_loras=3, max_rank=8)


@pytest.fixture
def made(save_checkpoint, load):
    """(model, its config, adapters of ranks 1, 4 and 8)"""
    config_class, fields = FAMILIES["llama"]
    folder, reference = save_checkpoint(getattr(transformers, config_class), base=fields)
    adapters = []
    for rank, pattern in ((1, "q_proj|v_proj"), (4, "mlp"), (8, "")):
        pairs = random_pairs(sizes_of(reference, pattern), rank, seed=rank)
        weights = {path: LoRAWeights(*pair, 1.5) for path, pair in pairs.items()}
        adapters.append(LoRAAdapter(f"of rank {rank}", weights))
    return load(folder), load_config(folder), adapters


def slots_of(model, config) -> AdapterSlots:
    return AdapterSlots(model, config, LIMITS, TorchAdapterKernels(CPU), torch.float32)


def all_of(slot: int, count: int = 6) -> torch.Tensor:
    return torch.full((count,), slot, dtype=torch.int32)


def test_rows_get_their_own_adapter_or_none(made, run) -> None:
    model, config, adapters = made
    token_ids = torch.tensor([5, 700, 3, 8, 2, 1012])
    plain = run(model, token_ids, [6])
    slots = slots_of(model, config)
    for slot, adapter in enumerate(adapters):
        slots.load(slot, adapter)
    slots.set_rows(all_of(-1))
    assert torch.equal(run(model, token_ids, [6]), plain), "base rows keep their bits"
    linear = model.get_submodule("model.layers.0.self_attn.qkv_proj")
    x = torch.randn(6, 64)
    rows = torch.tensor([1, -1, 0, 2, -1, 1], dtype=torch.int32)
    alone = []
    for slot in rows.tolist():
        slots.set_rows(all_of(slot))
        alone.append(linear(x))
    slots.set_rows(rows)
    together = linear(x)
    for row, found in enumerate(together):
        torch.testing.assert_close(found, alone[row][row])
    assert torch.equal(together[[1, 4]], alone[1][[1, 4]])


def test_a_slot_is_filled_anew_and_emptied(made, run) -> None:
    model, config, (small, mlp, whole) = made
    slots, token_ids = slots_of(model, config), torch.arange(6)
    slots.set_rows(all_of(2))
    plain = run(model, token_ids, [6])
    expected = []
    for adapter in (small, mlp):
        slots.load(2, adapter)
        expected.append(run(model, token_ids, [6]))
    slots.load(2, whole)
    assert not torch.equal(run(model, token_ids, [6]), expected[0])
    for adapter, logits in zip((small, mlp), expected, strict=True):
        slots.load(2, adapter)
        assert torch.equal(run(model, token_ids, [6]), logits), "nothing is left of another"
    slots.clear(2)
    assert torch.equal(run(model, token_ids, [6]), plain)


def test_an_adapter_that_does_not_fit_changes_nothing(made, run) -> None:
    model, config, (small, _, whole) = made
    slots, token_ids = slots_of(model, config), torch.arange(6)
    slots.load(0, small)
    slots.set_rows(all_of(0))
    before = run(model, token_ids, [6])
    wrong = LoRAAdapter("wrong", whole.weights | {"model.layers.9.mlp.up_proj": small.weights[
        "model.layers.0.self_attn.q_proj"]})  # fmt: skip
    with pytest.raises(AdapterError, match="adapter wrong: the model has no linear"):
        slots.load(0, wrong)
    large = LoRAWeights(torch.ones(9, 64), torch.ones(96, 9), 1.0)
    with pytest.raises(AdapterError, match="rank 9, above max_lora_rank, 8"):
        slots.check(LoRAAdapter("large", {"model.layers.0.mlp.up_proj": large}))
    assert torch.equal(run(model, token_ids, [6]), before)


@pytest.mark.parametrize("part", ["a", "b", "scaling"])
def test_numbers_that_are_infinite_in_the_models_dtype_are_refused(made, part: str) -> None:
    model, config, _ = made
    slots = slots_of(model, config)
    path = "model.layers.0.mlp.up_proj"
    num_outputs = model.get_submodule("model.layers.0.mlp.gate_up_proj").part_sizes[1]
    a, b = torch.ones(4, 64).double(), torch.ones(num_outputs, 4)
    fields = {"a": a, "b": b, "scaling": 3e38}
    slots.check(LoRAAdapter("large", {path: LoRAWeights(**fields)}))
    given = {"a": a * 1e39, "b": b.double() * 1e39, "scaling": -3.5e38}
    with pytest.raises(AdapterError, match=r"up_proj has numbers, .* infinite in float32"):
        slots.check(LoRAAdapter("large", {path: LoRAWeights(**(fields | {part: given[part]}))}))


def test_slots_bytes_predicts_the_allocated_size(made) -> None:
    model, config, _ = made
    methods = LinearMethods(DenseMethod())
    whole = blueprint(config, find_entry(config), methods)
    expected = slots_bytes(whole, config, LIMITS, TorchAdapterKernels(CPU), torch.float32)
    slots = slots_of(model, config)
    assert slots.num_bytes == expected
    held = 0
    for module in model.modules():
        if isinstance(module, Linear) and module.adapter is not None:
            held += sum(each.nbytes for each in (*module.adapter._a, *module.adapter._b))
    assert held == expected


def test_shapes_alone_are_checked_like_tensors(made) -> None:
    model, config, adapters = made
    slots = slots_of(model, config)

    def without_content(adapter: LoRAAdapter, num_more: int) -> LoRAAdapter:
        weights = {}
        for path, each in adapter.weights.items():
            (rank, inputs), (outputs, _) = each.a.shape, each.b.shape
            a = torch.empty(rank, inputs + num_more, device="meta")
            weights[path] = LoRAWeights(a, torch.empty(outputs, rank, device="meta"), 1.0)
        return LoRAAdapter(adapter.name, weights)

    for adapter in adapters:
        slots.check_shapes(without_content(adapter, 0))
        with pytest.raises(AdapterError, match="it was trained on another model"):
            slots.check_shapes(without_content(adapter, 1))
