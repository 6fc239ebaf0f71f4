"""A hybrid served by an engine: the same tokens and log-probabilities whatever happens to memory.

The family is a test's own (`tests.runtime.hybrid_family`), its layers of all kinds of memory.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.hybrid_family import LAYERS, registered, save_hybrid

from quire.core.sampling_params import SamplingParams
from quire.core.scheduling.growth_forecast import GrowthForecast
from quire.engine_client.results import RequestOutput
from quire.offline.llm import LLM

NUM_REQUESTS = 8
SHARED = 45
"""Tokens that every second prompt begins with."""

KINDS = {
    "windows": ["window", "full", "window", "full", "window"],
    "latents": ["latent", "full", "latent"],
    "states": ["delta", "full", "conv", "delta"],
    "all kinds": list(LAYERS),
    "nothing but states": ["delta", "conv", "delta"],
}


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    with registered():
        path = tmp_path_factory.mktemp(request.param)
        yield save_hybrid(path, layer_types=KINDS[request.param])


def make_llm(folder: Path, **options: Any) -> LLM:
    sizes = {"max_model_len": 192, "block_size": 8}
    llm = LLM(str(folder), skip_tokenizer_init=True, dtype="float32", **(sizes | options))
    return llm


def make_crowd() -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    rng = random.Random(3)
    shared = [rng.randrange(499) for _ in range(SHARED)]
    prompts, params = [], []
    for index in range(NUM_REQUESTS):
        own = [rng.randrange(499) for _ in range(rng.randrange(1, 70))]
        prompts.append({"prompt_token_ids": (shared if index % 2 == 0 else []) + own})
        params.append(
            SamplingParams(
                n=1 + index % 3,
                temperature=(0.0, 1.0)[index % 2],
                seed=index,
                max_tokens=6 + 4 * index,
                ignore_eos=True,
                logprobs=0,
            )
        )
    return prompts, params


Found = list[list[list[tuple[int, float]]]]
"""Of each request and branch the tokens, with their log-probabilities."""


def results(outputs: list[RequestOutput]) -> Found:
    return [
        [
            [
                (token, entry[token].logprob)
                for token, entry in zip(branch.token_ids, branch.logprobs, strict=True)
            ]
            for branch in output.outputs
        ]
        for output in outputs
    ]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Found:
    llm = make_llm(folder, enable_prefix_caching=False, block_size=16)
    if llm.engine.facts["kernels"] == "torch":
        pytest.skip("torch's products have other bits in other steps")
    found: Found = []
    for prompt, wish in zip(*make_crowd(), strict=True):
        found += results(llm.generate(prompt, wish, use_tqdm=False))
    assert len({str(branches) for branches in found}) == NUM_REQUESTS
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 24, "max_num_seqs": 20, "async_scheduling": True},
        {"block_size": 32, "enable_prefix_caching": False, "max_num_seqs": 3},
        {"tiny": True},
        {"tiny": True, "max_num_batched_tokens": 40, "max_num_seqs": 20, "async_scheduling": True},
    ],
    ids=lambda options: ",".join(options) or "default",
)
def test_nothing_that_happens_to_memory_changes_a_token(
    folder: Path, options: dict[str, Any], alone: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_tiny = "tiny" in options
    options = {name: value for name, value in options.items() if name != "tiny"}
    if is_tiny:  # hardly more than the longest sequence
        whole = make_llm(folder, **options, num_blocks=4096)
        options["num_blocks"] = whole.engine.scheduler.memory.growth.most_to_hold(192) * 5 // 4
    llm = make_llm(folder, **options)
    if is_tiny:  # so that much is preempted
        monkeypatch.setattr(GrowthForecast, "fits_later", lambda *_: True)
    prompts, params = make_crowd()
    for _ in range(1 if is_tiny else 2):  # the second time with a warm prefix cache
        assert results(llm.generate(prompts, params, use_tqdm=False)) == alone
    stats = llm.engine.stats()
    assert stats.num_held_blocks == 0
    assert is_tiny == (stats.num_preemptions > 0)
    assert options.get("enable_prefix_caching", True) == (stats.num_hit_tokens > 0)


def test_a_branch_of_a_running_request_goes_on_as_if_alone(folder: Path, alone: Found) -> None:
    """The ledger counts a hybrid's pages, and says what is unused of them."""
    llm = make_llm(folder)
    prompts, params = make_crowd()
    with llm.start(prompts[3], params[3]) as trunk:
        for _ in range(5):
            trunk.step()
        report = llm.memory_report()
        held = report.useful_bytes + report.unfilled_bytes + report.unused_bytes
        assert report.unused_bytes < 0.25 * held  # of a model of five layers
        assert (report.unused_bytes == 0) == folder.name.startswith("latents")
        assert sum(report.parts.values()) == llm.engine.facts["kv_cache_bytes"]
        num_shared = len(trunk.output.token_ids)
        branch = trunk.fork(params[3])
        expected = [token for token, _ in alone[3][0]]
        assert list(trunk.finish().token_ids) == expected
        assert num_shared >= 3
        assert list(branch.finish().token_ids)[:num_shared] == expected[:num_shared]
