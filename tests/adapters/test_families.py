"""Adapters of all linears of every family: the results are those of merged weights."""

import pytest
import torch
import transformers
from tests.adapters.peft_folders import merge, random_pairs, save_peft, sizes_of
from tests.models.family_shapes import FAMILIES
from tests.models.test_wrappers import CASES, save_wrapped

from quire.adapters.linear_slots import SlotLimits, TorchAdapterKernels
from quire.adapters.peft_folder import read_adapter
from quire.adapters.slots import AdapterSlots
from quire.models.registry import load_config
from quire.models.wrappers import WRAPPERS

CPU = torch.device("cpu")
NUM_TOKENS = 24


@pytest.mark.parametrize("family", FAMILIES)
def test_the_results_are_those_of_merged_weights(family, save_checkpoint, load, run, tmp_path):
    config_class, fields = FAMILIES[family]
    folder, reference = save_checkpoint(getattr(transformers, config_class), base=fields)
    model = load(folder)
    pairs = random_pairs(sizes_of(reference), rank=4)
    slots = AdapterSlots(
        model, load_config(folder), SlotLimits(2, 16), TorchAdapterKernels(CPU), torch.float32
    )
    adapter = read_adapter(save_peft(tmp_path / "lora", pairs, lora_alpha=6), 16, slots)
    token_ids = torch.randint(0, model.vocab_size, (NUM_TOKENS,))
    slots.load(1, adapter)
    slots.set_rows(torch.full((NUM_TOKENS,), -1, dtype=torch.int32))
    plain = run(model, token_ids, [NUM_TOKENS])
    slots.set_rows(torch.full((NUM_TOKENS,), 1, dtype=torch.int32))

    logits = run(model, token_ids, [NUM_TOKENS])

    with torch.inference_mode():
        torch.testing.assert_close(
            plain, reference(token_ids[None]).logits[0], atol=1e-3, rtol=1e-3
        )
        merge(reference, pairs, 6 / 4)
        expected = reference(token_ids[None]).logits[0]
    assert (expected - plain).abs().max() > 0.1, "the adapter changes nothing"
    scale = max(1.0, expected.std().item())
    torch.testing.assert_close(logits, expected, atol=1e-4 * scale, rtol=1e-4)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("name", CASES)
def test_multimodal_models_have_adapters_of_their_text(name, prefix, load, run, tmp_path):
    """prefix: of linears as PEFT found them, with transformers 5 and 4. What the adapter has of the
    part that sees images changes nothing of text."""
    reference = save_wrapped(name, tmp_path)
    model = load(tmp_path)
    pairs = random_pairs(sizes_of(reference, r"(language|text)_model\."), rank=4)
    saved = {path.replace("model.language_model.", prefix): pair for path, pair in pairs.items()}
    unused = f"model.{WRAPPERS[name].unused[0]}blocks.0.attn.qkv"
    saved |= random_pairs({unused: (24, 72)}, rank=4)
    slots = AdapterSlots(
        model, load_config(tmp_path), SlotLimits(1, 16), TorchAdapterKernels(CPU), torch.float32
    )
    adapter = read_adapter(save_peft(tmp_path / "lora", saved, lora_alpha=6), 16, slots)
    assert len(adapter.weights) == len(pairs)
    slots.check(adapter)
    slots.load(0, adapter)
    token_ids = torch.randint(10, model.vocab_size, (NUM_TOKENS,))
    slots.set_rows(torch.full((NUM_TOKENS,), 0, dtype=torch.int32))

    logits = run(model, token_ids, [NUM_TOKENS])

    merge(reference, pairs, 6 / 4)
    with torch.inference_mode():
        expected = reference(input_ids=token_ids[None]).logits[0]
    scale = max(1.0, expected.std().item())
    torch.testing.assert_close(logits, expected, atol=1e-4 * scale, rtol=1e-4)
