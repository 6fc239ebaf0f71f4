"""With the native kernels a request's tokens and log-probabilities are equal to the bit, whatever
runs beside it, however its prompt is cut, on any number of threads, in every number format."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.checkpoints import save_checkpoint
from tests.engine.crowding import preempt_much

from quire.core.sampling_params import SamplingParams
from quire.engine_client.results import RequestOutput
from quire.offline.llm import LLM

pytestmark = pytest.mark.usefixtures("native_engine")

NUM_REQUESTS = 14
MAX_MODEL_LEN = 640  # two tiles of attention and a half

FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int8 KV": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int8 KV, fp32": {"dtype": "float32", "kv_cache_dtype": "int8"},
}

FAMILIES = ("granite", "llama", "olmo2", "qwen3")
CASES = [
    (index, *case)
    for index, case in enumerate(
        [
            ("llama", "bf16"),
            *(("llama", number_format) for number_format in FORMATS if number_format != "bf16"),
            *((family, "bf16") for family in ("granite", "olmo2", "qwen3")),
        ]
    )
]

ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "crowd": {"max_num_seqs": 48, "num_threads": 2},
    "small chunks": {"max_num_batched_tokens": 48, "max_num_seqs": 48, "num_threads": 3},
    "other blocks": {"block_size": 8, "max_num_seqs": 5, "num_threads": 1},
    "large blocks": {"block_size": 256, "max_num_batched_tokens": 200, "num_threads": 2},
    "little memory": {"num_blocks": 40, "max_num_batched_tokens": 96, "num_threads": 2},
}

Found = list[list[tuple[list[int], list[float], float]]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    changes = {"max_position_embeddings": 1024, "hidden_size": 112, "intermediate_size": 160}
    return {
        family: save_checkpoint(family, tmp_path_factory.mktemp(family), **changes)
        for family in FAMILIES
    }


def make_crowd() -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """Prompts from 1 to 500 tokens, some with a common prefix; greedy and sampled, some forked."""
    rng = random.Random(8)
    shared = [rng.randrange(31, 1000) for _ in range(290)]
    prompts, params = [], []
    for index in range(NUM_REQUESTS):
        own = [rng.randrange(31, 1000) for _ in range(rng.choice((1, 2, 17, 70, 200)))]
        prompts.append({"prompt_token_ids": (shared if index % 3 == 0 else []) + own})
        params.append(
            SamplingParams(
                n=1 + (index % 4 == 0),
                temperature=(0.0, 0.8, 1.5)[index % 3],
                seed=index,
                max_tokens=rng.randrange(2, 40),
                ignore_eos=True,
                logprobs=2,
            )
        )
    return prompts, params


def found_by(outputs: list[RequestOutput]) -> Found:
    """Tokens, the log-probabilities of all of them and of the runners-up, and their sum."""
    found: Found = []
    for output in outputs:
        branches = []
        for branch in output.outputs:
            assert branch.logprobs is not None and branch.cumulative_logprob is not None
            values = [entry.logprob for step in branch.logprobs for entry in step.values()]
            branches.append((branch.token_ids, values, branch.cumulative_logprob))
        found.append(branches)
    return found


@pytest.mark.parametrize(("index", "family", "number_format"), CASES)
def test_equal_to_the_bit(
    index: int, family: str, number_format: str, folders: dict[str, Path]
) -> None:
    """The first case is served in all arrangements, the other cases in every second one."""

    def make_llm(**options: Any) -> LLM:
        given = {"max_model_len": MAX_MODEL_LEN, "skip_tokenizer_init": True}
        return LLM(str(folders[family]), **(given | FORMATS[number_format] | options))

    llm = make_llm(enable_prefix_caching=False, num_threads=1)
    prompts, params = make_crowd()
    alone: Found = []
    for prompt, wish in zip(prompts, params, strict=True):
        alone += found_by(llm.generate(prompt, wish, use_tqdm=False))
    assert len({str(branches) for branches in alone}) == NUM_REQUESTS
    for place, (name, options) in enumerate(ARRANGEMENTS.items()):
        if index and (index + place) % 2:
            continue
        llm = make_llm(**options)
        preempt_much(llm)
        assert found_by(llm.generate(prompts, params, use_tqdm=False)) == alone, name
        # A second time, from the prefix cache.
        assert found_by(llm.generate(prompts, params, use_tqdm=False)) == alone, name
        if name == "little memory":
            assert llm.engine.stats().num_preemptions > 0
        elif name == "crowd":
            assert llm.engine.stats().num_hit_tokens > 1000


def test_native_kernels_are_what_runs(folders: dict[str, Path]) -> None:
    llm = LLM(str(folders["llama"]), skip_tokenizer_init=True, max_model_len=64)
    assert torch.get_num_threads() == 1
    assert type(llm.engine._runner._forward).__name__ == "NativeForward"
