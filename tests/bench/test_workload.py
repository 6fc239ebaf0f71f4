"""The load: seeded, of the right shape, valid in the vocabulary."""

from dataclasses import replace

import pytest

from quire.bench.workload import BenchRequest, LengthSpec, WorkloadSpec, make_requests
from quire.bench.workload import request_lengths as lengths_of
from quire.errors import ConfigurationError

VOCAB_SIZE = 500


def test_lengths_are_those_of_the_common_workload() -> None:
    """The sums of the 48 requests that other engines were measured with."""
    lengths = lengths_of(WorkloadSpec(num_prompts=48))
    assert sum(prompt for prompt, _ in lengths) == 9695
    assert sum(output for _, output in lengths) == 10660


def test_lengths_have_the_mean_and_the_bounds_asked_for() -> None:
    spec = WorkloadSpec(num_prompts=20_000)
    prompts, outputs = zip(*lengths_of(spec), strict=True)
    assert min(prompts) == 16 and max(prompts) == 1024
    assert min(outputs) == 8 and max(outputs) == 512
    # Cutting the long tail takes a little off the mean.
    assert sum(prompts) / len(prompts) == pytest.approx(220, rel=0.05)
    assert sum(outputs) / len(outputs) == pytest.approx(180, rel=0.08)


def test_without_spread_all_lengths_are_the_mean() -> None:
    assert set(lengths_of(WorkloadSpec(num_prompts=9, sigma=0.0))) == {(220, 180)}


def test_the_same_seed_makes_the_same_requests() -> None:
    spec = WorkloadSpec(num_prompts=12)
    assert make_requests(spec, VOCAB_SIZE, 1) == make_requests(spec, VOCAB_SIZE, 1)
    other = make_requests(replace(spec, seed=spec.seed + 1), VOCAB_SIZE, 1)
    assert other != make_requests(spec, VOCAB_SIZE, 1)


def test_another_round_has_the_same_lengths_and_other_tokens() -> None:
    spec = WorkloadSpec(num_prompts=12, shared_prefix_tokens=20)
    first, second = (make_requests(spec, VOCAB_SIZE, index) for index in (0, 1))
    assert [_shape(one) for one in first] == [_shape(one) for one in second]
    for one, other in zip(first, second, strict=True):
        assert one.prompt_token_ids[:20] != other.prompt_token_ids[:20]
        assert one.prompt_token_ids[20:] != other.prompt_token_ids[20:]


def test_tokens_are_of_the_vocabulary_and_lengths_as_said() -> None:
    spec = WorkloadSpec(num_prompts=40)
    requests = make_requests(spec, VOCAB_SIZE, 0)
    tokens = {token for request in requests for token in request.prompt_token_ids}
    assert tokens == set(range(VOCAB_SIZE))  # 8000 draws miss none of 500
    assert [_shape(request) for request in requests] == lengths_of(spec)
    assert [request.index for request in requests] == list(range(40))
    assert requests[3].num_tokens == sum(_shape(requests[3]))


def test_a_shared_prefix_comes_in_addition_and_is_the_same_for_all() -> None:
    spec = WorkloadSpec(num_prompts=6)
    shared = replace(spec, shared_prefix_tokens=33)
    requests = make_requests(shared, VOCAB_SIZE, 0)
    assert len({tuple(request.prompt_token_ids[:33]) for request in requests}) == 1
    assert [request.prompt_token_ids[33:] for request in requests] == [
        request.prompt_token_ids for request in make_requests(spec, VOCAB_SIZE, 0)
    ]


def test_a_limit_keeps_the_first_requests_unchanged() -> None:
    spec = WorkloadSpec(num_prompts=30)
    limited = make_requests(replace(spec, limit=4), VOCAB_SIZE, 0)
    assert limited == make_requests(spec, VOCAB_SIZE, 0)[:4]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_prompts": 0}, "num_prompts is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"limit": 0}, "limit is 0"),
        ({"shared_prefix_tokens": -5}, "shared_prefix_tokens is -5"),
        ({"sigma": -0.1}, "sigma is -0.1"),
        ({"input": LengthSpec(2000, 16, 1024)}, "input_mean is 2000, outside 16 to 1024"),
        ({"output": LengthSpec(4, 8, 512)}, "output_mean is 4, outside 8 to 512"),
        ({"output": LengthSpec(4, 0, 512)}, "output_min is 0"),
    ],
)
def test_invalid_workload_fields_are_refused_by_name(change: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        WorkloadSpec(**change)  # type: ignore[arg-type]


def _shape(request: BenchRequest) -> tuple[int, int]:
    return len(request.prompt_token_ids), request.output_len
