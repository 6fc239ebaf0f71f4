"""The fit, its order, and how it follows what steps take."""

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from quire.core.scheduling.cost_model import NUM_SEGMENTS, StepCostModel, StepLoad, StepSample

Truth = Callable[[StepLoad], float]
FLOOR_S, TOKEN_S = 5e-3, 0.4e-3


def roofline(load: StepLoad) -> float:
    """Weights are read once, or arithmetic takes longer; attention reads and multiplies."""
    num_tokens = load.num_decodes + load.num_chunk_tokens
    linear_s = max(FLOOR_S, TOKEN_S * num_tokens) + 0.5e-3
    return linear_s + 1e-6 * load.num_decode_pairs + 0.5e-6 * load.num_chunk_pairs


def overhead(load: StepLoad) -> float:
    """Mostly a fixed part, as for a small model; and each row is sampled."""
    return 4e-3 + 20e-6 * load.num_chunk_tokens + 100e-6 * load.num_decodes


def with_vocabulary(load: StepLoad) -> float:
    """A prompt token's log-probabilities take three times what the token takes."""
    return roofline(load) + 3 * TOKEN_S * load.num_logprob_tokens


def samples_of(truth: Truth) -> list[StepSample]:
    """What calibration measures: decodes, chunks beside one decode, and both after a context."""
    loads = [StepLoad(size, size) for size in (1, 2, 4, 8, 16, 32, 64)]
    loads += [StepLoad(1, 1).with_chunk(0, size) for size in (8, 16, 32, 64, 128, 256)]
    loads += [StepLoad(2, 2050), StepLoad(1, 1025).with_chunk(1024, 32)]
    return [StepSample(load, truth(load)) for load in loads]


def fitted(truth: Truth) -> StepCostModel:
    return StepCostModel.fit(samples_of(truth))


def fitted_with_vocabulary() -> StepCostModel:
    asked = [StepLoad(1, 1).with_chunk(0, size, wants_logprobs=True) for size in (16, 128)]
    return StepCostModel.fit(
        samples_of(with_vocabulary) + [StepSample(load, with_vocabulary(load)) for load in asked]
    )


def error(model: StepCostModel, truth: Truth, load: StepLoad) -> float:
    return abs(model.predict_s(load) / truth(load) - 1)


def test_a_chunk_attends_to_what_is_before_it_and_to_itself() -> None:
    load = StepLoad(2, 30).with_chunk(10, 3).with_chunk(0, 2)
    assert load == StepLoad(2, 30, 5, (11 + 12 + 13) + (1 + 2), 0, 2, 13 + 2)


@pytest.mark.parametrize("truth", [roofline, overhead])
def test_measured_steps_are_predicted(truth: Truth) -> None:
    model = fitted(truth)
    for load, _ in samples_of(truth):
        assert error(model, truth, load) < 0.06, load


@pytest.mark.parametrize("truth", [roofline, overhead])
def test_steps_between_and_beyond_the_measured_ones_are_predicted(truth: Truth) -> None:
    """Several decodes beside a chunk, sizes between those measured, and far beyond them."""
    model = fitted(truth)
    for num_decodes, chunk, context in ((4, 24, 300), (16, 48, 0), (48, 100, 700), (8, 2000, 0)):
        load = StepLoad(num_decodes, num_decodes * 500).with_chunk(context, chunk)
        assert error(model, truth, load) < 0.15, load


def test_the_cost_of_prompt_logprobs_is_predicted_and_learned() -> None:
    model = fitted_with_vocabulary()
    for size in (8, 64, 256):
        asked = StepLoad(4, 2000).with_chunk(100, size, wants_logprobs=True)
        assert asked.num_logprob_tokens == size
        assert error(model, with_vocabulary, asked) < 0.15, size
        assert error(model, with_vocabulary, StepLoad(4, 2000).with_chunk(100, size)) < 0.15, size
    ignorant, asked = fitted(roofline), StepLoad(4, 2000).with_chunk(0, 64, wants_logprobs=True)
    for _ in range(200):
        ignorant.observe(asked, with_vocabulary(asked))
    assert error(ignorant, with_vocabulary, asked) < 0.1


def test_a_disturbed_sample_bends_the_fit_but_a_little() -> None:
    """Relative errors: one step that took twice as long can't outweigh its neighbours."""
    samples = samples_of(roofline)
    samples[3] = StepSample(samples[3].load, 2 * samples[3].seconds)
    model = StepCostModel.fit(samples)
    assert error(model, roofline, StepLoad(1, 1).with_chunk(0, 32)) < 0.3
    assert error(model, roofline, StepLoad(1, 1)) < 0.15


def test_one_sample_is_enough_to_begin_with() -> None:
    model = StepCostModel.fit([StepSample(StepLoad(3, 100), 0.02)])
    assert model.predict_s(StepLoad(3, 100)) == pytest.approx(0.02, rel=0.01)


def test_more_work_never_takes_less() -> None:
    """Whatever noise it is fitted to."""
    rng = random.Random(1)
    for _ in range(10):
        noisy = [StepSample(load, s * rng.uniform(0.5, 2)) for load, s in samples_of(roofline)]
        model = StepCostModel.fit(noisy)
        for _ in range(30):
            model.observe(StepLoad(rng.randint(1, 64), 900), rng.uniform(1e-3, 0.1))
        sizes = [model.predict_s(StepLoad(1, 1, size, 0)) for size in range(0, 3000, 7)]
        assert all(small <= large for small, large in pairwise(sizes))
        load = StepLoad(4, 400, 10, 100)
        least = model.predict_s(load)
        names = ("num_decode_pairs", "num_chunk_tokens", "num_chunk_pairs", "num_logprob_tokens")
        for name in names:
            more = load._replace(**{name: getattr(load, name) + 50})
            assert model.predict_s(more) >= least, name


@pytest.mark.parametrize("size", [1, 2, 3, 1000, 1023, 1024, 1025, 2048, 2049, 5000])
def test_the_sum_by_segments_is_the_sum_over_all_parts(size: int) -> None:
    """At the corners, between them and in the open last segment: slope i is i there."""
    slopes = [float(index + 1) for index in range(NUM_SEGMENTS)]
    model = StepCostModel([7.0, *slopes, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    expected = 7.0
    for token in range(1, size):
        expected += min(token.bit_length(), NUM_SEGMENTS)
    assert model.predict_s(StepLoad(0, 0, size, 0)) == expected


@pytest.mark.parametrize("num_computed", [0, 4000])
def test_the_longest_chunk_within_a_limit(num_computed: int) -> None:
    model, load = fitted(roofline), StepLoad(4, 800)
    for limit_s in (0.006, 0.008, 0.02, 0.1):
        most = model.most_tokens(limit_s, load, num_computed, 500)
        if most < 500:
            assert model.predict_s(load.with_chunk(num_computed, most + 1)) > limit_s
        if most:
            assert model.predict_s(load.with_chunk(num_computed, most)) <= limit_s
    assert model.most_tokens(10.0, load, num_computed, 500) == 500
    assert model.most_tokens(1e-4, load, num_computed, 500) == 0


def test_a_long_context_shortens_the_chunk() -> None:
    model, load = fitted(roofline), StepLoad(4, 800)
    near, far = (model.most_tokens(0.03, load, context, 500) for context in (0, 4000))
    assert 0 < far < 0.3 * near


# ---- following what steps take ------------------------------------------------------------------


def mixed_loads(count: int, seed: int = 2) -> list[StepLoad]:
    """Steps of four streams: every third with a chunk."""
    rng = random.Random(seed)
    loads = []
    for index in range(count):
        load = StepLoad(4, 4 * rng.randint(100, 300))
        loads.append(load if index % 3 else load.with_chunk(0, rng.randint(8, 60)))
    return loads


def learn(model: StepCostModel, truth: Truth, count: int) -> None:
    for load in mixed_loads(count):
        model.observe(load, truth(load))


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_model_that_is_wrong_about_prompts_learns(factor: float) -> None:
    """Its chunks took `factor` times what they take now, its decodes did not."""

    def was(load: StepLoad) -> float:
        alone_s = roofline(load._replace(num_chunk_tokens=0, num_chunk_pairs=0))
        return alone_s + factor * (roofline(load) - alone_s)

    model = fitted(was)
    asked = StepLoad(4, 800).with_chunk(0, 32)
    assert error(model, roofline, asked) > 0.15
    learn(model, roofline, 150)
    assert error(model, roofline, asked) < 0.1
    assert error(model, roofline, StepLoad(4, 800)) < 0.1


def test_cost_model_learns_a_slope_that_was_fitted_as_zero() -> None:
    """From 64 tokens on further ones seem to cost nothing: chunks that end there are learned as
    fast as others."""
    values = list(fitted(roofline).coefficients)
    values[7] = 0.0
    model, rng = StepCostModel(values), random.Random(5)
    asked = StepLoad(16, 1600).with_chunk(0, 90)
    assert error(model, roofline, asked) > 0.2
    for _ in range(200):
        load = StepLoad(16, 1600).with_chunk(0, rng.randint(20, 110))
        model.observe(load, roofline(load))
    assert error(model, roofline, asked) < 0.05


def test_outliers_hardly_move_it() -> None:
    model, rng = fitted(roofline), random.Random(3)
    asked = StepLoad(4, 800).with_chunk(0, 32)
    for load in mixed_loads(600):
        slow = 20 if rng.random() < 0.03 else 1
        model.observe(load, slow * roofline(load))
    assert error(model, roofline, asked) < 0.15
    before_s = model.predict_s(asked)
    model.observe(asked, 100.0)
    assert model.predict_s(asked) < 1.06 * before_s


def test_a_step_of_which_nothing_is_known_is_learned_from_the_first() -> None:
    """Coefficients of disturbed samples may be 0: a step can't fail of that."""
    model = StepCostModel([0.0] * len(fitted(overhead)._coefficients))
    model.observe(StepLoad(), 0.0)
    for _ in range(50):
        model.observe(StepLoad(1, 1), 0.004)
    assert model.predict_s(StepLoad(1, 1)) == pytest.approx(0.004, rel=0.1)


def test_a_step_without_tokens_takes_its_fixed_part() -> None:
    model = StepCostModel([1e-3, 2e-3, *fitted(overhead)._coefficients[2:]])
    assert model.predict_s(StepLoad()) == 1e-3


def test_steps_that_take_no_time_are_no_mistake() -> None:
    model = fitted(overhead)
    for _ in range(10_000):
        model.observe(StepLoad(1, 1), 0.0)
    assert 0 <= model.predict_s(StepLoad(1, 1)) < 1e-8


def test_the_same_calls_give_the_same_model() -> None:
    first, second = fitted(overhead), fitted(overhead)
    for model in (first, second):
        learn(model, roofline, 50)
    loads = mixed_loads(20, seed=9)
    assert [first.predict_s(load) for load in loads] == [second.predict_s(load) for load in loads]
    assert first.predict_s(loads[0]) != fitted(overhead).predict_s(loads[0])


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 8, 2000])
def test_the_first_draft_takes_the_difference_of_two_predictions(num_rows: int) -> None:
    model = StepCostModel(
        [1e-5 * place for place in range(1, 1 + len(fitted(overhead).coefficients))]
    )
    load = StepLoad(num_rows, 100)
    with_draft = load.with_drafts(0, 1)._replace(num_chunk_pairs=0)
    difference_s = model.predict_s(with_draft) - model.predict_s(load)
    assert model.first_draft_s(load) == pytest.approx(difference_s)
