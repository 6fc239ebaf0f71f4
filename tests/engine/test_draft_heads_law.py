"""Heads draft on every family that has them, and change no token and no bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engine.crowding import preempt_much
from tests.engine.image_prompts import IMAGE_FAMILIES, answers_of, requests_of
from tests.engine.test_law import make_crowd
from tests.engine.test_speculation_law import seen
from tests.models.heads.head_files import (
    add_layer_head,
    add_named_head,
    repeat_last_layer,
    save_eagle3,
    save_family,
)

from quire import LLM, SamplingParams
from quire.core.scheduling.pacing import ConstantPacer
from quire.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from quire.models.registry import load_config

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_batched_tokens": 72,
    "block_size": 8,
}


def save(name: str, folder: Path) -> dict[str, Any]:
    """A model and its head; returns the options that name them."""
    if name == "qwen3_next":
        kinds = ["linear_attention", "full_attention"] * 2
        save_family(name, folder, vocab_size=4096, layer_types=kinds, num_hidden_layers=4)
        add_named_head(folder)
        return {"model": str(folder), "speculation": "mtp"}
    if name not in ("llama", "qwen3"):
        save_family(name, folder, vocab_size=4096)
        add_layer_head(folder)
        return {"model": str(folder), "speculation": "mtp"}
    save_family(name, folder, num_hidden_layers=8, vocab_size=4096)
    size = load_config(folder).hidden_size
    save_eagle3(folder / "head", size=size, vocab_size=4096, draft_vocab_size=900)
    return {"model": str(folder), "speculative_model": str(folder / "head")}


def crowd() -> tuple[list[Any], list[SamplingParams]]:
    """Requests with all options but strings, which need a tokenizer."""
    prompts, params = make_crowd()
    for each in params:
        each.stop = None
    return prompts[:6], params[:6]


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4-moe", "llama", "qwen3_next"])
@pytest.mark.usefixtures("native_engine")
def test_heads_change_nothing_of_an_answer(name: str, tmp_path: Path) -> None:
    options = save(name, tmp_path)
    prompts, params = crowd()
    without = LLM(options["model"], **OPTIONS, speculation="off")
    plain = without.generate(prompts, params, use_tqdm=False)
    crowded = {"num_blocks": 36} if name in ("glm4-moe", "llama") else {}
    llm = LLM(**{**OPTIONS, **options, **crowded})
    llm.engine.scheduler.pacer = ConstantPacer()  # drafts are made whatever they cost
    if crowded:  # so that much is preempted
        preempt_much(llm)
    for _ in range(1 + bool(crowded)):  # the second time with a warm prefix cache
        found = llm.generate(prompts, params, use_tqdm=False)
        assert seen(found) == seen(plain)
    stats = llm.engine.stats()
    method = options.get("speculation", "eagle3")
    verified = stats.drafts["by_proposer"][method]["verified"]
    assert sum(verified) > 100 and stats.num_held_blocks == 0
    assert bool(crowded) == (stats.num_preemptions > 0)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3_next", {"dtype": "bfloat16"}),
        ("llama", {"quantization": "int8", "num_blocks": 40}),
    ],
)
@pytest.mark.usefixtures("native_engine", "forked_ranks")
def test_the_first_of_two_ranks_drafts_with_the_whole_vocabulary(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Ranks have shards of the embedding and the vocabulary projection, which a head shares."""
    method = "eagle3" if name == "llama" else "mtp"
    options = save(name, tmp_path) | {"speculation": method}
    given = OPTIONS | changes | {"tensor_parallel_size": 2}
    prompts, params = (each[:4] for each in crowd())
    plain = LLM(**{**given, "model": options["model"], "num_blocks": 200, "speculation": "off"})
    expected = seen(plain.generate(prompts, params, use_tqdm=False))
    llm = LLM(**{**given, **options})
    llm.engine.scheduler.pacer = ConstantPacer()
    for _ in range(2):  # the second time with a warm prefix cache
        assert seen(llm.generate(prompts, params, use_tqdm=False)) == expected
    verified = llm.engine.stats().drafts["by_proposer"][method]["verified"]
    assert sum(verified) > 60
    facts = llm.engine.facts
    assert facts["draft_weight_bytes"] > 4096 * load_config(tmp_path).hidden_size


@pytest.mark.usefixtures("native_engine")
def test_heads_with_other_options(tmp_path: Path) -> None:
    """Compressed K and V, tiers that a second engine reads, overlap, and known drafts beside."""
    options = save("glm4-moe", tmp_path / "model") | {"num_blocks": 90}
    prompts, params = crowd()
    before: dict[str, Any] = {}
    for more in (
        {"kv_cache_dtype": "int8"},
        {"cache_dir": str(tmp_path / "cache"), "cache_size": "64MiB"},
        {"cache_dir": str(tmp_path / "cache"), "cache_size": "64MiB"},
        {"async_scheduling": True, "speculation": "ngram,mtp", "ngram_min_match": 1},
    ):
        kv = str(more.get("kv_cache_dtype", "auto"))
        if kv not in before:
            plain = LLM(options["model"], **OPTIONS, kv_cache_dtype=kv, speculation="off")
            before[kv] = seen(plain.generate(prompts, params, use_tqdm=False))
        llm = LLM(**{**OPTIONS, **options, **more})
        llm.engine.scheduler.pacer = ConstantPacer()
        assert seen(llm.generate(prompts, params, use_tqdm=False)) == before[kv]
        assert llm.engine.stats().drafts["by_proposer"]["mtp"]["verified"][0] > 10
        llm.engine.tier_work.close()


@pytest.mark.usefixtures("native_engine")
def test_an_image_longer_than_the_budget_leaves_room_for_what_a_head_reads(tmp_path: Path) -> None:
    """Its step computes more tokens than `max_num_batched_tokens`, and the head reads all."""
    family = IMAGE_FAMILIES["gemma3"]
    family.save(tmp_path)
    save_eagle3(
        tmp_path / "head", size=48, vocab_size=1013, eagle_aux_hidden_state_layer_ids=[0, 1, 2]
    )
    options = OPTIONS | {"model": str(tmp_path), "max_num_batched_tokens": 4, "max_num_seqs": 4}
    assert family.num_placeholders > 4
    plain = answers_of(LLM(**options, speculation="off").engine, requests_of(family))
    llm = LLM(**options, speculative_model=str(tmp_path / "head"))
    assert answers_of(llm.engine, requests_of(family)) == plain


@pytest.mark.usefixtures("native_engine")
def test_a_head_that_repeats_its_model_is_always_right(tmp_path: Path) -> None:
    """The model's layers do nothing but for the last one, which the head has, too; and the head
    reads the embedding alone. So both compute the same, in greedy and in sampled rows."""
    options = save("glm4-moe", tmp_path)
    repeat_last_layer(tmp_path)
    prompts, params = crowd()
    plain = [replace(each, logit_bias=None) for each in params]
    for each in plain:
        each.presence_penalty = each.frequency_penalty = 0.0
        each.repetition_penalty = 1.0
    llm = LLM(**{**OPTIONS, **options})
    llm.engine.scheduler.pacer = ConstantPacer()
    llm.generate(prompts, plain, use_tqdm=False)
    counts = llm.engine.stats().drafts["by_proposer"]["mtp"]
    assert sum(counts["verified"]) > 50 and counts["accepted"] == counts["verified"]


def test_heads_that_can_not_draft_are_refused_by_name(tmp_path: Path) -> None:
    plain, model = save_family("llama", tmp_path / "plain"), tmp_path / "model"
    save("qwen3", model)
    head = str(model / "head")
    for options, error, message in (
        (
            {"model": str(plain), "speculation": "mtp"},
            ConfigurationError,
            "speculation has 'mtp', but quire has no MTP heads of LlamaForCausalLM",
        ),
        (
            {"model": str(save_family("glm4-moe", tmp_path / "moe")), "speculation": "mtp"},
            CheckpointError,
            "the weights have no layer that predicts further tokens",
        ),
        (
            {"model": str(plain), "speculative_model": head},
            ConfigurationError,
            "reads the inputs of the layers 2, 1, 0, but the model has 3 layers",
        ),
        (
            {"model": str(model), "speculative_model": head, "kernels": "triton"},
            ConfigurationError,
            "in this version a head drafts on the CPU only",
        ),
        (
            {"model": str(model), "speculative_model": head, "speculation": "draft_model"},
            ConfigurationError,
            "it is a head for EAGLE-3; set speculation to 'eagle3'",
        ),
        (
            {"model": str(model), "speculative_model": str(plain), "speculation": "eagle3"},
            ConfigurationError,
            "it is no head for EAGLE-3; set speculation to 'draft_model'",
        ),
        (
            {"model": str(model), "speculation": "eagle3"},
            ConfigurationError,
            "no model drafts; name one with speculative_model, or leave eagle3 out",
        ),
        (
            {"model": str(model), "speculation": "mtp,eagle3", "speculative_model": head},
            ConfigurationError,
            "one of mtp and eagle3 drafts; leave the others out",
        ),
        (
            {"model": head},
            UnsupportedModelError,
            "LlamaForCausalLMEagle3",
        ),
    ):
        with pytest.raises(error, match=message):
            LLM(**OPTIONS, **options)
