"""The baseline on transformers: same tokens, a time for each step, a way out where it's missing."""

import sys

import pytest
import torch

from quire.bench.contenders import MEMORY_FIGURES, ContinuousBatches
from quire.bench.hf_generate import HfModel, HfStaticBatches, TokenClock
from quire.bench.workload import WorkloadSpec, make_requests
from quire.engine.engine import Engine
from quire.errors import ConfigurationError
from quire.hub.model_folder import resolve_model_folder


@pytest.fixture(scope="module")
def model() -> HfModel:
    pytest.importorskip("transformers")
    return HfModel(resolve_model_folder(None, None), torch.float32)


@pytest.mark.parametrize("width", [1, 4])
def test_tokens_are_those_of_the_engine(
    model: HfModel, engine: Engine, small_load: WorkloadSpec, width: int
) -> None:
    requests = make_requests(small_load, engine.limits.vocab_size, 0)
    record = HfStaticBatches(model, width).run(requests)
    expected = ContinuousBatches(engine).run(requests)
    assert [timeline.token_ids for timeline in record.timelines] == [
        timeline.token_ids for timeline in expected.timelines
    ]
    assert [timeline.num_prompt_tokens for timeline in record.timelines] == [
        timeline.num_prompt_tokens for timeline in expected.timelines
    ]


def test_beams_find_a_likelier_continuation_than_greedy_decoding(model: HfModel) -> None:
    prompt = list(range(100, 120))
    likelihoods = []
    for num_beams in (1, 4):
        (found,) = model.generate([prompt], 8, num_beams=num_beams)
        assert len(found) == 8
        with torch.inference_mode():
            logits = model._model(torch.tensor([prompt + found])).logits[0]
        chosen = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
        likelihoods.append(chosen.gather(1, torch.tensor(found)[:, None]).sum())
    assert likelihoods[1] > likelihoods[0]


def test_each_token_has_the_time_of_its_step(model: HfModel, small_load: WorkloadSpec) -> None:
    requests = make_requests(small_load, 4096, 0)
    record = HfStaticBatches(model, 4).run(requests)
    for request, timeline in zip(requests, record.timelines, strict=True):
        assert len(timeline.token_times_s) == request.output_len
        assert timeline.token_times_s == sorted(set(timeline.token_times_s))
        assert timeline.ttft_s > 0 and timeline.e2el_s <= record.duration_s
    assert len({timeline.arrival_s for timeline in record.timelines}) == 1
    assert record.memory == dict.fromkeys(MEMORY_FIGURES)


def test_the_clock_ignores_the_prompts_that_come_first() -> None:
    clock = TokenClock()
    clock.put(torch.zeros(2, 9))
    assert clock.times_s == []
    for count in (1, 2, 3):
        clock.put(torch.zeros(2))
        assert len(clock.times_s) == count
    clock.end()
    assert clock.times_s == sorted(clock.times_s)


def test_without_transformers_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # what makes its import fail
    with pytest.raises(ConfigurationError, match="pip install transformers accelerate"):
        HfModel(resolve_model_folder(None, None), torch.float32)
