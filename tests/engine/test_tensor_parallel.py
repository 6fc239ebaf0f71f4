"""Two processes with half of a model each: the tokens of one with all of it."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.engine.checkpoints import save_checkpoint
from tests.engine.crowding import preempt_much
from tests.engine_client.engine_harness import collect, pull, tokens_of

from quire.core.request import Request
from quire.core.sampling_params import BeamSearchParams, DecodingParams, SamplingParams
from quire.engine_client.fleet import EngineFleet
from quire.engine_client.one_engine import start_one_engine
from quire.engine_client.recovery import Cause, Death
from quire.engine_client.results import CompletionOutput
from quire.errors import ConfigurationError, EngineDeadError
from quire.offline.llm import LLM

PROMPTS = [{"prompt_token_ids": list(range(40 + 7 * i, 47 + 19 * i))} for i in range(5)]
WISHES = [
    SamplingParams(temperature=0.0, max_tokens=20, logprobs=2, ignore_eos=True),
    SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=16, logprobs=0, ignore_eos=True),
    SamplingParams(top_k=20, min_p=0.01, seed=4, max_tokens=9, prompt_logprobs=1, logprobs=1),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2, seed=5, max_tokens=30),
    SamplingParams(temperature=0.0, logit_bias={77: 9.0}, max_tokens=12, ignore_eos=True),
]


def make_llm(folder: Path, num_ranks: int, **options: Any) -> LLM:
    options = {"dtype": "float32", "max_model_len": 192} | options
    llm = LLM(folder, skip_tokenizer_init=True, tensor_parallel_size=num_ranks, **options)
    preempt_much(llm)
    return llm


def generate(llm: LLM, first: int = 0, last: int = 5) -> list[list[CompletionOutput]]:
    outputs = llm.generate(PROMPTS[first:last], WISHES[first:last], use_tqdm=False)
    return [output.outputs for output in outputs]


def find_beams(llm: LLM) -> list[list[int]]:
    wish = BeamSearchParams(beam_width=3, max_tokens=12)
    (output,) = llm.beam_search(PROMPTS[1], wish, use_tqdm=False)
    return [sequence.tokens for sequence in output.sequences]


def tokens(found: list[list[CompletionOutput]]) -> list[list[list[int]]]:
    return [[branch.token_ids for branch in branches] for branches in found]


def logprobs(found: list[list[CompletionOutput]]) -> list[float | None]:
    return [branch.cumulative_logprob for branches in found for branch in branches]


@pytest.mark.parametrize(
    ("family", "changes", "options"),
    [
        (
            "llama",
            {"attention_bias": True, "mlp_bias": True},
            {"max_num_batched_tokens": 72, "block_size": 8, "num_blocks": 12, "max_model_len": 96},
        ),
        (
            "qwen3",
            {"num_attention_heads": 4, "num_key_value_heads": 2},
            {"async_scheduling": True, "max_itl_ratio": 2.0},
        ),
    ],
)
def test_the_tokens_of_one_rank_until_one_dies(
    family: str,
    changes: dict[str, Any],
    options: dict[str, Any],
    tmp_path: Path,
    why_torch: str | None,
) -> None:
    before = psutil.Process().children()
    folder = save_checkpoint(family, tmp_path, **changes)
    one = make_llm(folder, 1, **options)
    expected, expected_beams = generate(one), find_beams(one)
    llm = make_llm(folder, 2, **options)
    found = generate(llm)
    assert tokens(found) == tokens(expected)
    assert find_beams(llm) == expected_beams
    if "num_blocks" in options:
        assert llm.engine.stats().num_preemptions > 0
    near = pytest.approx([value for value in logprobs(expected) if value is not None], abs=1e-3)
    assert [value for value in logprobs(found) if value is not None] == near
    # And the law: alone a request has the very same bits.
    for index in range(5):
        alone = generate(llm, index, index + 1)
        assert tokens(alone) == tokens(found[index : index + 1])
        if why_torch is None:
            assert logprobs(alone) == logprobs(found[index : index + 1])
    assert llm.engine.stats().num_held_blocks == 0
    assert llm.engine.stats().num_failed_steps == 0
    (worker,) = set(psutil.Process().children()) - set(before)
    worker.kill()
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="rank 1: its process has died"):
            generate(llm)
    assert not worker.is_running()


def test_models_that_cannot_be_split_are_refused_before_any_process_starts(tmp_path: Path) -> None:
    folder = save_checkpoint("qwen3", tmp_path)
    before = psutil.Process().children()
    with pytest.raises(ConfigurationError, match=r"7 attention heads.*can be split over 1$"):
        make_llm(folder, 2)
    assert psutil.Process().children() == before


def test_streams_outlive_a_rank(tmp_path: Path) -> None:
    """The engine's process ends with the rank, and the API server starts both again: these take the
    cache folder over."""
    folder = save_checkpoint("llama", tmp_path)
    options = {"model": str(folder), "dtype": "float32", "max_model_len": 192}
    prompt = list(range(40, 60))
    wish = SamplingParams(temperature=1.0, seed=9, max_tokens=150, ignore_eos=True)
    llm = LLM(**options, skip_tokenizer_init=True)
    (expected,) = llm.generate({"prompt_token_ids": prompt}, wish, use_tqdm=False)

    async def run() -> None:
        ranks = {"tensor_parallel_size": 2, "cache_dir": str(tmp_path / "cache")}
        engine = await start_one_engine(options | ranks)
        listener = engine.engines_by_name[""]
        judge, deaths = listener.on_death, []

        def on_death(death: Death) -> frozenset[Death]:
            deaths.append(death.cause)
            return judge(death)

        listener.on_death = on_death  # type: ignore[method-assign]
        try:
            params = DecodingParams(max_tokens=150, temperature=1.0, seed=9)
            stream = pull(engine, Request("r", prompt, params))
            reader = asyncio.ensure_future(collect(stream))
            await until(lambda: engine.num_open == 1)
            await until_steps(engine, 10)
            assert listener.pid is not None
            (worker,) = psutil.Process(listener.pid).children()
            os.kill(worker.pid, signal.SIGKILL)
            outputs = await reader
            assert tokens_of(outputs, "r") == list(expected.outputs[0].token_ids)
            assert engine.num_restarts == 1
            assert deaths == [Cause.OUTSIDE], "the rank was killed, by somebody"
        finally:
            await engine.shutdown(drain=False, timeout_s=5)

    asyncio.run(asyncio.wait_for(run(), 60))


async def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.002)


async def until_steps(engine: EngineFleet, count: int) -> None:
    while (await engine.stats())["num_steps"] < count:
        pass
