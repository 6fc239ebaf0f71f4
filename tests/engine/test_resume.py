"""A stream that outlives its engine: the same tokens and log-probabilities, to the bit (fp32)."""

import random
from typing import Any

import pytest
import torch

from quire.assembly.build import build_engine
from quire.core.request import Request, SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.engine.engine import Engine

MAX_TOKENS = 24
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 160, "num_blocks": 400}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_requests() -> list[Request]:
    """Greedy and seeded, with every option whose state depends on tokens, n > 1 and beams."""
    rng = random.Random(5)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 2},
        {"temperature": 1.0, "logprobs": 2, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 40, "min_p": 0.02, "repetition_penalty": 1.2, "logprobs": 1},
        {"temperature": 1.0, "presence_penalty": 0.6, "frequency_penalty": 0.4, "logprobs": 5},
        {"temperature": 0.0, "frequency_penalty": 1.5, "min_tokens": 12, "logprobs": 1},
        {"temperature": 1.5, "stop_token_ids": tuple(range(100, 400)), "min_tokens": 7},
        {"temperature": 0.9, "bad_words": ((10, 11), (40,)), "logit_bias": ((5, 4.0),)},
        {"temperature": 1.0, "allowed_token_ids": tuple(range(40, 90)), "logprobs": 1},
        {"temperature": 0.0, "beam_width": 3},
    ]
    shared = [rng.randrange(3, 4096) for _ in range(33)]
    requests = []
    for index, kind in enumerate(kinds):
        own = [rng.randrange(3, 4096) for _ in range(rng.randrange(1, 40))]
        params = DecodingParams(
            max_tokens=MAX_TOKENS - index, seed=1000 + index, end_token_ids=(2, 0), **kind
        )
        prompt = (shared if index % 2 else []) + own
        n = kind.get("beam_width") or 1 + index % 3
        requests.append(Request(f"r{index}", prompt, params, n=n))
    return requests


Answers = dict[tuple[str, int], list[SequenceOutput]]


def take_steps(engine: Engine, answers: Answers, num_steps: int | None = None) -> None:
    """So many steps, or all."""
    count = 0
    while engine.has_work() and count != num_steps:
        count += 1
        for output in engine.step():
            answers.setdefault((output.request_id, output.branch_index), []).append(output)


def resume(engine: Engine, requests: list[Request], answers: Answers) -> None:
    """Ask for what is missing, as the API server does."""
    for request in requests:
        found = {index: answers.get((request.request_id, index), []) for index in range(request.n)}
        branches = {
            index: [token_id for output in outputs for token_id in output.token_ids]
            for index, outputs in found.items()
            if not (outputs and outputs[-1].finish_reason)
        }
        if branches:
            has_output = any(found.values())
            engine.add(request.resume(branches, has_output=has_output, elapsed_s=0.0))


def told(answers: Answers, *, with_logprobs: bool) -> dict[tuple[str, int], Any]:
    """All that a client sees of each branch."""
    return {
        key: (
            [token_id for output in outputs for token_id in output.token_ids],
            (outputs[-1].finish_reason, outputs[-1].stop_reason),
            [entry for output in outputs for entry in output.logprobs or ()]
            if with_logprobs
            else None,
            [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
            if with_logprobs
            else None,
            outputs[-1].cumulative_logprob if with_logprobs else None,
        )
        for key, outputs in sorted(answers.items())
    }


@pytest.fixture(scope="module")
def undisturbed() -> Answers:
    engine, answers = build_engine(OPTIONS), Answers()
    for request in make_requests():
        engine.add(request)
    take_steps(engine, answers)
    assert len(answers) == sum(request.n for request in make_requests())
    return answers


@pytest.mark.parametrize(
    ("options", "deaths"),
    [
        ({}, [1]),
        ({}, [9]),
        ({"block_size": 64, "max_num_batched_tokens": 64}, [4, 6]),
        ({"num_blocks": 60, "max_num_seqs": 6, "scheduling_policy": "fair"}, [15, 3]),
        ({"enable_prefix_caching": False}, [1, 1, 1, 1, 5]),
        ({"speculation": "ngram", "ngram_min_match": 1}, [3, 2, 4]),
    ],
    ids=str,
)
def test_resumed_answers_equal_those_of_an_undisturbed_engine(
    options: dict[str, Any], deaths: list[int], undisturbed: Answers, why_torch: str | None
) -> None:
    """The engines' options may differ, too: nothing of what they change is in an answer."""
    requests, answers = make_requests(), Answers()
    engine = build_engine(OPTIONS)
    for request in requests:
        engine.add(request)
    for num_steps in deaths:
        take_steps(engine, answers, num_steps)
        engine = build_engine(OPTIONS | options)
        resume(engine, requests, answers)
    take_steps(engine, answers)
    assert engine.stats().num_held_blocks == 0
    exact = why_torch is None
    expected = told(undisturbed, with_logprobs=exact)
    found = told(answers, with_logprobs=exact)
    for key, answer in expected.items():
        assert found[key] == answer, key
    assert found.keys() == expected.keys()


@pytest.mark.usefixtures("native_engine")
@pytest.mark.parametrize("numbers", [{"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_the_bits_are_equal_in_other_numbers_too(numbers: dict[str, Any]) -> None:
    requests = make_requests()
    told_by: list[Any] = []
    for deaths in ([], [7]):
        engine, answers = build_engine(OPTIONS | numbers), Answers()
        for request in requests:
            engine.add(request)
        for num_steps in deaths:
            take_steps(engine, answers, num_steps)
            engine = build_engine(OPTIONS | numbers)
            resume(engine, requests, answers)
        take_steps(engine, answers)
        told_by.append(told(answers, with_logprobs=True))
    assert told_by[0] == told_by[1]


def test_branches_that_are_resumed_share_their_prompt_through_the_cache() -> None:
    engine, answers = build_engine(OPTIONS), Answers()
    request = Request("a", [*range(3, 83)], DecodingParams(20, temperature=1.0), n=3)
    engine.add(request.resume({0: [5, 6], 1: [7], 2: []}, has_output=True, elapsed_s=0.0))
    take_steps(engine, answers)
    assert engine.stats().num_hit_tokens >= 2 * 64, "four whole blocks, twice"
