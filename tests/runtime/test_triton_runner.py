"""The device's path with nothing but Triton kernels, in the interpreter, from end to end.

Small, for the interpreter takes half a second a step; `test_device_runner.py` has the crowds.
"""

from typing import Any

import pytest
import torch
from tests.engine.checkpoints import save_checkpoint
from tests.engine.crowding import preempt_much
from tests.engine.drafting import recorded, use_proposer

from quire.core.sampling_params import SamplingParams
from quire.offline.llm import LLM
from quire.runtime.graphs import graph_sizes

pytest.importorskip("triton")

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [20, 21, 22], [30, 31, 32, 33, 34, 35]]
WISHES = [
    SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True, logprobs=1, prompt_logprobs=0),
    SamplingParams(n=2, temperature=1.2, top_p=0.9, seed=3, max_tokens=5, frequency_penalty=0.5),
    SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
]


@pytest.mark.parametrize("family", ["granite", "olmo2", "qwen3"])
def test_a_prompt_in_chunks_forks_and_static_steps_give_the_tokens_of_torch(
    family, tmp_path
) -> None:
    folder = str(save_checkpoint(family, tmp_path, **SMALL))
    torch.set_num_threads(1)

    def make_llm(kernels: str, **options: Any) -> LLM:
        return LLM(
            folder,
            skip_tokenizer_init=True,
            dtype="float32",
            kernels=kernels,
            max_model_len=32,
            block_size=8,
            max_num_seqs=4,
            max_num_batched_tokens=8,
            **options,
        )

    llm = make_llm("triton", async_scheduling=True, num_blocks=6)
    found, expected = (
        engine.generate([{"prompt_token_ids": ids} for ids in PROMPTS], WISHES, use_tqdm=False)
        for engine in (llm, make_llm("torch"))
    )
    for ours, theirs in zip(found, expected, strict=True):
        for branch, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert (branch.token_ids, branch.finish_reason) == (
                other.token_ids,
                other.finish_reason,
            )
    assert logprobs(found[0]) == pytest.approx(logprobs(expected[0]), abs=1e-5)
    runner = llm.engine._runner
    assert set(runner.graphs.sizes) <= set(graph_sizes(4)) and 4 in runner.graphs.sizes
    assert 8 in runner.graphs.mixed_sizes
    assert llm.engine.stats().num_held_blocks == 0


ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "crowd": {},
    "other blocks, chunked": {"block_size": 16, "max_num_batched_tokens": 6},
    "preempted": {"num_blocks": 4},
    "drafts": {},
}


@pytest.mark.parametrize(
    ("family", "names"),
    [("granite", ("crowd", "preempted")), ("olmo2", ("other blocks, chunked", "drafts"))],
)
def test_results_do_not_depend_on_batch_and_chunks(family, names, tmp_path) -> None:
    folder = str(save_checkpoint(family, tmp_path, **SMALL))
    torch.set_num_threads(1)

    def make_llm(**options: Any) -> LLM:
        sizes = {"max_model_len": 32, "block_size": 8, "max_num_seqs": 4, "num_blocks": 12}
        return LLM(
            folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            kernels="triton",
            batch_invariant=True,
            **(sizes | options),
        )

    # Each grows into one more block, and two have a common prefix.
    first = list(range(5, 19))
    prompts = [{"prompt_token_ids": ids} for ids in (first, list(range(20, 27)), first[:6])]
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=4, ignore_eos=True, logprobs=1)
    llm = make_llm(enable_prefix_caching=False)
    outputs = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
    alone = [bits(output) for output in outputs]
    for name in names:
        llm = make_llm(**ARRANGEMENTS[name])
        preempt_much(llm)
        if name == "drafts":
            use_proposer(llm.engine, recorded(outputs, [params] * len(outputs)))
        crowd = llm.generate(prompts, params, use_tqdm=False)
        assert [bits(output) for output in crowd] == alone, name
        assert llm.engine._runner.graphs.mixed_sizes, name
        assert (llm.engine.stats().num_preemptions > 0) == (name == "preempted"), name
        assert (llm.engine.stats().num_accepted_drafts > 0) == (name == "drafts"), name


def bits(output: Any) -> tuple[list[int], list[float]]:
    (branch,) = output.outputs
    return branch.token_ids, [
        logprob.logprob for entry in branch.logprobs for logprob in entry.values()
    ]


def logprobs(output: Any) -> list[float]:
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return [logprob.logprob for entry in entries for logprob in entry.values()]
