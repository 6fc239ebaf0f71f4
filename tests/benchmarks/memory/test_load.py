"""The load of the memory benchmark: seeded, with the means asked for, and of the right rate."""

import math
from dataclasses import replace
from statistics import fmean

import pytest
from benchmarks.memory.load import (
    SHAPES,
    MemoryLoad,
    draw_arrivals,
    draw_lengths,
    make_memory_requests,
)

from quire.errors import ConfigurationError

LOAD = MemoryLoad(num_prompts=500)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("num_prompts", "sigma"), [(20, 0.8), (500, 0.8), (500, 1.4), (500, 0.0)])
def test_the_drawn_lengths_have_the_very_means(shape, num_prompts: int, sigma: float) -> None:
    load = MemoryLoad(num_prompts, shape.input_mean, shape.output_mean, sigma)
    inputs, outputs = zip(*draw_lengths(load), strict=True)
    assert len(inputs) == num_prompts
    assert fmean(inputs) == pytest.approx(shape.input_mean, abs=0.5)
    assert fmean(outputs) == pytest.approx(shape.output_mean, abs=0.5)
    assert min(inputs + outputs) >= 1 and max(inputs + outputs) <= 1024
    if sigma == 0:
        assert set(inputs) == {shape.input_mean} and set(outputs) == {shape.output_mean}


def test_lengths_of_running_sequences_have_the_published_mean() -> None:
    """E[length now] over time, at one token a step: the published 440 tokens (see MemoryLoad)."""
    lengths = draw_lengths(replace(LOAD, num_prompts=20_000))
    steps = sum(output for _, output in lengths)
    tokens = sum(output * (prompt + output / 2) for prompt, output in lengths)
    assert tokens / steps == pytest.approx(440, rel=0.05)


def test_arrivals_come_at_the_rate() -> None:
    arrivals = draw_arrivals(replace(LOAD, num_prompts=4000, requests_per_s=8.0))
    assert arrivals == sorted(arrivals) and arrivals[0] > 0
    assert 4000 / arrivals[-1] == pytest.approx(8.0, rel=0.05)


def test_at_an_infinite_rate_all_are_there_at_once() -> None:
    assert draw_arrivals(replace(LOAD, requests_per_s=math.inf)) == [0.0] * 500


def test_the_same_seed_makes_the_same_load() -> None:
    other = replace(LOAD, seed=LOAD.seed + 1)
    for draw in (draw_lengths, draw_arrivals, lambda load: make_memory_requests(load, 99)):
        assert draw(LOAD) == draw(LOAD)
        assert draw(LOAD) != draw(other)


def test_lengths_do_not_depend_on_the_rate() -> None:
    assert draw_lengths(LOAD) == draw_lengths(replace(LOAD, requests_per_s=9.0))


def test_requests_are_of_their_length_and_of_the_vocabulary() -> None:
    requests = make_memory_requests(replace(LOAD, num_prompts=40), 30)
    lengths = [(len(request.prompt_token_ids), request.output_len) for request in requests]
    assert lengths == draw_lengths(replace(LOAD, num_prompts=40))
    assert {token for request in requests for token in request.prompt_token_ids} == set(range(30))
    assert [request.index for request in requests] == list(range(40))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_prompts": 0}, "num_prompts is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"max_model_len": 3}, "max_model_len is 3"),
        ({"input_mean": 0}, "input_mean is 0, but must be from 1 to 1024"),
        ({"output_mean": 1025}, "output_mean is 1025, but must be from 1 to 1024, half of max_mod"),
        ({"sigma": -0.1}, "sigma is -0.1"),
        ({"requests_per_s": 0.0}, "request_rate is 0.0, but must be above 0, or inf"),
        ({"requests_per_s": math.nan}, "request_rate is nan"),
    ],
)
def test_invalid_load_fields_are_refused_by_name(change: dict[str, float], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        replace(LOAD, **change)  # type: ignore[arg-type]
