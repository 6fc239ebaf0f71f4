"""The law against the outside: fp32 greedy tokens equal transformers', whatever the memory does."""

import random
from pathlib import Path

import pytest
import torch
from tests.engine.checkpoints import CONFIGS, save_checkpoint
from tests.engine.reference import Reference, assert_greedy
from transformers import AutoModelForCausalLM

from quire.core.sampling_params import SamplingParams
from quire.core.scheduling.growth_forecast import GrowthForecast
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.offline.llm import LLM

BLOCK_EDGE_LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100)
NUM_NEW_TOKENS = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)

SETTINGS = {
    "whole": {},
    "chunked": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
    # 13 prompts and their outputs need 78 blocks of 16 in each KV group.
    "preempted": {"num_blocks": 27, "max_model_len": 144},
    "preempted, chunked, small blocks": {
        "num_blocks": 56,
        "max_model_len": 144,
        "block_size": 8,
        "max_num_batched_tokens": 20,
        "max_num_seqs": 12,
    },
    "one block each": {"block_size": 256, "enable_prefix_caching": False},
}

Family = tuple[Path, Reference]


@pytest.fixture(scope="module", params=[*CONFIGS, "embedded"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.set_num_threads(1)
    name = request.param
    folder = EMBEDDED_MODEL
    if name != "embedded":
        folder = save_checkpoint(name, tmp_path_factory.mktemp(name))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return folder, Reference(model.eval())


def make_prompts(seed: int) -> list[dict[str, list[int]]]:
    rng = random.Random(seed)
    return [
        {"prompt_token_ids": [rng.randrange(3, 1000) for _ in range(length)]}
        for length in BLOCK_EDGE_LENGTHS
    ]


@pytest.mark.parametrize("setting", SETTINGS)
def test_greedy_tokens_equal(family: Family, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, reference = family
    options = SETTINGS[setting]
    if "num_blocks" in options and reference.model.config.model_type in ("qwen2", "mistral"):
        # What windows hold is bounded and known, so that nobody has to go: unless all are let in.
        whole = LLM(str(folder), skip_tokenizer_init=True, **options | {"num_blocks": 1024})
        growth = whole.engine.scheduler.memory.growth
        options = options | {"num_blocks": growth.most_to_hold(options["max_model_len"]) * 5 // 4}
        monkeypatch.setattr(GrowthForecast, "fits_later", lambda *_: True)
    llm = LLM(str(folder), skip_tokenizer_init=True, dtype="float32", speculation="off", **options)
    prompts = make_prompts(9)
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = prompt["prompt_token_ids"]
        tokens = output.outputs[0].token_ids
        expected = min(NUM_NEW_TOKENS, llm.engine.limits.max_model_len - len(ids))
        assert len(tokens) == expected
        assert_greedy(reference, ids, tokens, f"{setting}, prompt of {len(ids)}")
    stats = llm.engine.stats()
    assert stats.num_held_blocks == 0
    assert (stats.num_preemptions > 0) == ("preempted" in setting)


def test_prefix_hits_change_nothing(family: Family) -> None:
    folder, reference = family
    llm = LLM(str(folder), skip_tokenizer_init=True, dtype="float32")
    shared = [random.Random(5).randrange(3, 1000) for _ in range(70)]
    for tail in ([7], [8, 9], [], list(range(10, 40))):
        prompt = [*shared, *tail]
        output = llm.generate({"prompt_token_ids": prompt}, GREEDY, use_tqdm=False)[0]
        assert_greedy(reference, prompt, output.outputs[0].token_ids, f"tail of {len(tail)}")
        # To the token, but for the prompt's last one, which is always computed.
        assert output.num_cached_tokens == {1: 0, 2: 70, 0: 69, 30: 70}[len(tail)]


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "yarn"])
def test_a_context_longer_than_the_trained_one(rope_type: str, tmp_path: Path) -> None:
    """Dynamic: transformers takes the frequencies of the length that it is given at the moment, we
    those of max_model_len throughout. So each prompt here is continued up to max_model_len, and
    the reference reads prompt and output at once: it then has the same frequencies for all."""
    torch.set_num_threads(1)
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0}
    folder = save_checkpoint(
        "llama", tmp_path, max_position_embeddings=64, rope_parameters=rope, eos_token_id=None
    )
    reference = Reference(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    llm = LLM(str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=128)
    prompts = [prompt for prompt in make_prompts(3) if len(prompt["prompt_token_ids"]) >= 31]
    to_the_end = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, to_the_end, False), strict=True):
        ids, tokens = prompt["prompt_token_ids"], output.outputs[0].token_ids
        assert len(ids) + len(tokens) == 128
        assert_greedy(reference, ids, tokens, f"{rope_type}, prompt of {len(ids)}")
