"""A request gets the same tokens as if it ran alone, sampled ones too (embedded model, fp32)."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.checkpoints import save_checkpoint
from tests.engine.crowding import preempt_much

from quire.bench.baselines.contiguous import contiguous
from quire.core.sampling_params import SamplingParams
from quire.engine_client.results import RequestOutput
from quire.offline.llm import LLM

NUM_REQUESTS = 12


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_llm(**options: Any) -> LLM:
    return LLM(dtype="float32", **({"max_model_len": 256} | options))


def make_crowd() -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """Requests that differ in every option, some with a common prefix."""
    rng = random.Random(3)
    shared = [rng.randrange(3, 4096) for _ in range(40)]
    prompts, params = [], []
    for index in range(NUM_REQUESTS):
        own = [rng.randrange(3, 4096) for _ in range(rng.randrange(1, 60))]
        prompts.append({"prompt_token_ids": (shared if index % 3 == 0 else []) + own})
        params.append(
            SamplingParams(
                n=1 + index % 3,
                temperature=rng.choice((0.0, 0.3, 1.0, 2.0)),
                top_p=rng.choice((1.0, 0.9)),
                top_k=rng.choice((0, 5, 40)),
                min_p=rng.choice((0.0, 0.05)),
                presence_penalty=rng.choice((0.0, 0.5)),
                frequency_penalty=rng.choice((0.0, 0.3)),
                repetition_penalty=rng.choice((1.0, 1.2)),
                seed=index,
                max_tokens=rng.randrange(1, 40),
                min_tokens=0,
                ignore_eos=index % 2 == 0,
                logprobs=rng.choice((None, 0, 3)),
                logit_bias={5: 3.0} if index % 4 == 0 else None,
                stop="self" if index % 5 == 0 else None,
            )
        )
    return prompts, params


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[branch.token_ids for branch in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def alone() -> list[list[list[int]]]:
    llm = make_llm(enable_prefix_caching=False)
    prompts, params = make_crowd()
    found = []
    for prompt, wish in zip(prompts, params, strict=True):
        found += tokens(llm.generate(prompt, wish, use_tqdm=False))
    assert len({str(branches) for branches in found}) == NUM_REQUESTS
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 32, "max_num_seqs": 32},
        {"num_blocks": 20},
        {"num_blocks": 40, "block_size": 8, "max_num_batched_tokens": 48, "max_num_seqs": 48},
        {"block_size": 128, "max_num_seqs": 3, "enable_prefix_caching": False},
        {"scheduling_policy": "priority", "num_blocks": 17},
        {"scheduling_policy": "fair", "num_blocks": 18, "block_size": 16},
        {"scheduling_policy": "longest_prefix", "num_blocks": 150, "num_lookahead_blocks": 4},
        {"scheduling_policy": "deadline", "block_size": 2048, "max_num_seqs": 5},
        {"kv_allocator": contiguous("oracle"), "num_blocks": 64},
    ],
    ids=lambda options: ",".join(options),
)
def test_same_tokens_in_a_crowd(options: dict[str, Any], alone: list[list[list[int]]]) -> None:
    llm = make_llm(**options)
    preempt_much(llm)
    prompts, params = make_crowd()
    assert tokens(llm.generate(prompts, params, use_tqdm=False)) == alone
    # A second time, now with a warm prefix cache.
    assert tokens(llm.generate(prompts, params, use_tqdm=False)) == alone
    stats = llm.engine.stats()
    assert stats.num_held_blocks == 0
    if options.get("enable_prefix_caching", True) and "kv_allocator" not in options:
        assert stats.num_hit_tokens > 0
    if options.get("num_blocks", 99) <= 20:
        assert stats.num_preemptions > 0


def test_branches_differ_and_are_reproducible() -> None:
    wish = SamplingParams(n=4, temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
    first = make_llm().generate("import ", wish, use_tqdm=False)
    second = make_llm(seed=5).generate("import ", wish, use_tqdm=False)
    assert tokens(first) == tokens(second)
    assert len({tuple(branch) for branch in tokens(first)[0]}) == 4


def test_the_engines_seed_decides_unseeded_requests() -> None:
    wish = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    runs = [
        tokens(make_llm(seed=seed).generate(["a", "a"], wish, use_tqdm=False)) for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_forks_and_crowds_on_random_models(family: str, tmp_path: Path) -> None:
    """qwen2 has windows in some layers, and so several KV groups."""
    folder = str(save_checkpoint(family, tmp_path))
    rng = random.Random(9)
    shared = [rng.randrange(31, 1000) for _ in range(37)]
    prompts = [
        {"prompt_token_ids": shared[: 20 + index] + [rng.randrange(31, 1000)] * index}
        for index in range(6)
    ]
    wish = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=12, ignore_eos=True)
    expected: list[list[list[int]]] | None = None
    for options in (
        {"enable_prefix_caching": False, "max_num_seqs": 1},
        {"block_size": 8, "num_blocks": 64, "max_num_batched_tokens": 24, "max_num_seqs": 20},
        {"block_size": 32, "eviction": "lru", "scheduling_policy": "fair"},
    ):
        llm = LLM(folder, skip_tokenizer_init=True, dtype="float32", max_model_len=96, **options)
        found = tokens(llm.generate(prompts, wish, use_tqdm=False))
        expected = expected or found
        assert found == expected, options
    assert expected is not None and all(len(set(map(tuple, one))) == 3 for one in expected)
