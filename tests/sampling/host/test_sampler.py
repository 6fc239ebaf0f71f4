"""The whole sampler against a slow obvious reference, row by row; and that rows never meet."""

from collections import Counter
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.sampling_params import DecodingParams
from quire.sampling.host import choice, noise
from quire.sampling.host.sampler import MAX_BOUND, NO_TOKEN, Sampler, SamplingRows

V = 24
INF = float("inf")
Sequence = tuple[DecodingParams, list[int], list[int]]


def reference_logits(line: np.ndarray, sequence: Sequence, mask: bytes | None = None) -> np.ndarray:
    """The options that change logits, for one row, in plain loops."""
    params, prompt, output = sequence
    line = line.astype(np.float32).copy()
    for token in range(V):
        if mask is not None and not mask[token // 8] >> token % 8 & 1:
            line[token] = -INF
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            line[token] = -INF
    for *before, last in params.bad_words:
        if len(before) <= len(output) and output[len(output) - len(before) :] == before:
            line[last] = -INF
    if len(output) < params.min_tokens:
        line[[*params.end_token_ids, *params.stop_token_ids]] = -INF
    for token, bias in params.logit_bias:
        line[token] += np.float32(bias)
    counts = Counter(output)
    for token in set(prompt) | set(output):
        repetition = np.float32(params.repetition_penalty)
        line[token] = line[token] / repetition if line[token] > 0 else line[token] * repetition
        line[token] -= np.float32(params.frequency_penalty) * np.float32(counts[token])
        line[token] -= np.float32(params.presence_penalty) * np.float32(token in counts)
    return line


def reference_token(line: np.ndarray, sequence: Sequence, branch: int) -> int | None:
    """Temperature, min_p, top_k, top_p and the noise, for one row of processed logits."""
    params, prompt, output = sequence
    if line.max() == -INF:
        return None
    if params.temperature == 0.0:
        return int(line.argmax())
    x = ((line - line.max()) / np.float32(params.temperature)).astype(np.float64)
    weights = np.exp(x)
    left = [token for token in range(V) if x[token] > -INF and weights[token] >= params.min_p]
    if params.top_k:
        kth = sorted((x[token] for token in left), reverse=True)[: params.top_k][-1]
        left = [token for token in left if x[token] >= kth]
    total = sum(weights[token] for token in left)
    if params.top_p < 1.0:
        left = [
            token
            for token in left
            if sum(weights[t] for t in left if x[t] > x[token]) < params.top_p * total
        ]
    stream = np.array([noise.stream(params.seed, branch)])
    key = noise.row_keys(stream, np.array([len(prompt) + len(output)]))
    score = x + noise.gumbel(noise.uniforms(key, np.arange(V)))
    return max(left, key=lambda token: (score[token], -token))


token_ids = st.integers(0, V - 1)


@st.composite
def decoding_params(draw: Any) -> DecodingParams:
    """Each option is often left alone, so that rows use different sets of them."""

    def maybe(default: Any, values: st.SearchStrategy[Any]) -> Any:
        return draw(st.one_of(st.just(default), values))

    listed = maybe((), st.lists(token_ids, min_size=1, max_size=5, unique=True).map(tuple))
    return DecodingParams(
        max_tokens=99,
        temperature=maybe(0.0, st.sampled_from([0.01, 0.7, 1.0, 1.7, 30.0])),
        top_p=maybe(1.0, st.sampled_from([0.95, 0.6, 0.02])),
        top_k=maybe(0, st.sampled_from([1, 3, 10, V - 1])),
        min_p=maybe(0.0, st.sampled_from([0.02, 0.4])),
        presence_penalty=maybe(0.0, st.sampled_from([-1.5, 0.4, 2.0])),
        frequency_penalty=maybe(0.0, st.sampled_from([-0.7, 0.3, 1.9])),
        repetition_penalty=maybe(1.0, st.sampled_from([0.7, 1.1, 3.0])),
        seed=draw(st.integers(0, (1 << 64) - 1)),
        min_tokens=maybe(0, st.integers(1, 6)),
        end_token_ids=maybe((), st.just((0, 5))),
        stop_token_ids=maybe((), st.tuples(token_ids)),
        logprobs=0 if listed else maybe(None, st.integers(0, 4)),
        logprob_token_ids=listed,
        logit_bias=maybe((), st.just(((1, 3.5), (7, -100.0), (9, 0.125)))),
        bad_words=maybe(
            (), st.lists(st.lists(token_ids, min_size=1, max_size=3).map(tuple)).map(tuple)
        ),
        allowed_token_ids=maybe(None, st.sets(token_ids, min_size=1, max_size=9).map(tuple)),
    )


sequences = st.tuples(
    decoding_params(),
    st.lists(token_ids, min_size=1, max_size=8),
    st.lists(token_ids, max_size=12),
)
masks_or_none = st.one_of(st.none(), st.binary(min_size=V // 8, max_size=V // 8))


@settings(max_examples=40, deadline=None)
@given(
    crowd=st.lists(st.tuples(sequences, masks_or_none), min_size=1, max_size=8),
    salt=st.integers(0, 1 << 30),
    shift=st.integers(0, 7),
)
def test_equals_the_reference_alone_and_in_a_crowd(
    make_batch: Any, crowd: list[tuple[Sequence, bytes | None]], salt: int, shift: int
) -> None:
    lines = (np.random.default_rng(salt).normal(size=(len(crowd), V)) * 3).astype(np.float32)
    branches = list(range(len(crowd)))
    batch = make_batch(V, [sequence for sequence, _ in crowd], branches)
    order = np.roll(np.arange(len(crowd)), shift)
    masks = {row: mask for row, (_, mask) in enumerate(crowd) if mask is not None}
    together = batch.sample(lines[order], order, masks)
    for line, row in enumerate(order.tolist()):
        sequence, mask = crowd[row]
        expected = reference_token(reference_logits(lines[row], sequence, mask), sequence, row)
        assert together.token_ids[line] == (NO_TOKEN if expected is None else expected)
        assert (row in together.failed) == (expected is None)
        wants_logprobs = sequence[0].logprobs is not None and expected is not None
        assert (row in together.logprobs) == wants_logprobs
        alone = make_batch(V, [sequence], [row]).sample(
            lines[row : row + 1], [0], None if mask is None else {0: mask}
        )
        assert alone.token_ids[0] == together.token_ids[line]
        assert alone.logprobs.get(0) == together.logprobs.get(row)
        assert alone.failed.get(0) == together.failed.get(row)


@settings(max_examples=15, deadline=None)
@given(crowd=st.lists(sequences, min_size=2, max_size=6), salt=st.integers(0, 1 << 30))
def test_many_steps_with_kept_state_equal_a_fresh_start(
    make_batch: Any, crowd: list[Sequence], salt: int
) -> None:
    """What the sampler keeps between steps follows from the tokens: as after a preemption."""
    rng = np.random.default_rng(salt)
    kept = make_batch(V, crowd)
    outputs = [list(output) for _, _, output in crowd]
    for _ in range(6):
        rows = rng.permutation(len(crowd))[: rng.integers(1, len(crowd) + 1)]
        lines = (rng.normal(size=(len(rows), V)) * 3).astype(np.float32)
        fresh = make_batch(V, [(p, q, o) for (p, q, _), o in zip(crowd, outputs, strict=True)])
        sampled = kept.sample(lines, rows)
        assert sampled.token_ids.tolist() == fresh.sample(lines, rows).token_ids.tolist()
        for row, token_id in zip(rows.tolist(), sampled.token_ids.tolist(), strict=True):
            if token_id != NO_TOKEN:
                kept.append(row, token_id)
                outputs[row].append(token_id)


def greedy(**options: Any) -> Sequence:
    return DecodingParams(max_tokens=9, temperature=0.0, **options), [1], []


def sampled(**options: Any) -> Sequence:
    return DecodingParams(max_tokens=9, **options), [1], []


@pytest.mark.parametrize("value", [float("nan"), INF])
@pytest.mark.parametrize("kind", [greedy, sampled])
def test_a_row_with_broken_logits_fails_alone(make_batch: Any, kind: Any, value: float) -> None:
    rng = np.random.default_rng(0)
    lines = rng.normal(size=(4, V)).astype(np.float32)
    crowd = [kind(seed=7), kind(seed=8), kind(seed=9), kind(seed=7)]
    expected = make_batch(V, crowd).sample(lines).token_ids
    broken = lines.copy()
    broken[2, 3] = value
    result = make_batch(V, crowd).sample(broken)
    assert list(result.failed) == [2]
    assert "NaN or infinity" in result.failed[2]
    assert result.token_ids.tolist() == [expected[0], expected[1], NO_TOKEN, expected[3]]


def test_broken_logits_are_seen_where_options_would_hide_them(make_batch: Any) -> None:
    lines = np.zeros((1, V), dtype=np.float32)
    lines[0, 5] = float("nan")
    result = make_batch(V, [greedy(allowed_token_ids=(1, 2))]).sample(lines)
    assert "NaN or infinity" in result.failed[0]


def test_minus_infinity_everywhere_is_broken_too(make_batch: Any) -> None:
    for crowd in ([greedy()], [sampled()], [greedy(logprobs=1)]):
        result = make_batch(V, crowd).sample(np.full((1, V), -INF))
        assert "NaN or infinity" in result.failed[0]
        assert result.logprobs == {}


def test_a_row_whose_options_leave_no_token_fails_alone(make_batch: Any) -> None:
    crowd = [sampled(logprobs=2), sampled(allowed_token_ids=(3,), logprobs=2), greedy()]
    batch = make_batch(V, crowd)
    result = batch.sample(np.zeros((3, V)), masks={1: b"\x07\x00\x00"})
    assert list(result.failed) == [1]
    assert "allowed_token_ids" in result.failed[1]
    assert result.token_ids[1] == NO_TOKEN
    assert list(result.logprobs) == [0]
    assert result.token_ids[2] == 0
    # With another mask the same row goes on.
    assert batch.sample(np.zeros((3, V)), masks={1: b"\x08\x00\x00"}).token_ids[1] == 3


def test_greedy_takes_the_lowest_of_equal_tokens(make_batch: Any) -> None:
    line = np.zeros((1, V))
    line[0, [6, 4, 11]] = 2.0
    for crowd in ([greedy()], [greedy(logprobs=1)], [greedy(top_k=3, top_p=0.1, min_p=0.5)]):
        assert make_batch(V, crowd).sample(line).token_ids.tolist() == [4]


def test_plain_greedy_rows_take_the_short_way(
    make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unexpected(*arguments: Any) -> None:
        raise AssertionError("nothing is sampled here")

    monkeypatch.setattr(choice, "sample", unexpected)
    monkeypatch.setattr(torch.Tensor, "amax", unexpected)
    batch = make_batch(V, [greedy(), greedy(top_k=5), greedy(min_p=0.1, top_p=0.2)])
    assert batch.sample(np.eye(3, V)).token_ids.tolist() == [0, 1, 2]


def test_logprobs_are_of_the_model_before_any_option(make_batch: Any) -> None:
    line = np.random.default_rng(5).normal(size=(1, V)).astype(np.float32)
    options = {"logit_bias": ((3, 50.0),), "repetition_penalty": 2.0, "logprobs": 3}
    entry = make_batch(V, [sampled(temperature=0.1, **options)]).sample(line).logprobs[0]
    expected = torch.from_numpy(line).log_softmax(1)[0]
    assert entry.token_id == 3
    assert entry.logprob == float(expected[3])
    assert entry.rank == 1 + int((line[0] > line[0, 3]).sum())
    assert list(entry.top_token_ids) == np.argsort(-line[0])[:3].tolist()


def searching(width: int, temperature: float = 0.0, **options: Any) -> Sequence:
    return DecodingParams(9, temperature=temperature, beam_width=width, **options), [1], []


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.4, 3.0])
def test_a_beam_row_has_its_candidates_at_its_temperature(
    make_batch: Any, temperature: float
) -> None:
    line = np.random.default_rng(6).normal(size=(1, V)).astype(np.float32)
    batch = make_batch(V, [searching(3, temperature, end_token_ids=(0, 1))])
    result = batch.sample(line)
    entry = result.logprobs[0]
    expected = torch.from_numpy(line).div(temperature or 1.0).log_softmax(1)[0]
    assert result.token_ids.tolist() == [int(line.argmax())]
    assert entry.top_token_ids == tuple(np.argsort(-line[0])[:5].tolist())
    best = expected[list(entry.top_token_ids)].tolist()
    assert entry.top_logprobs == pytest.approx(best, abs=1e-6)


def test_equal_candidates_come_in_the_order_of_their_ids(make_batch: Any) -> None:
    line = np.zeros((1, V))
    line[0, [9, 4, 17]] = 1.0
    entry = make_batch(V, [searching(5)]).sample(line).logprobs[0]
    assert entry.top_token_ids == (4, 9, 17, 0, 1)


def test_a_tiny_vocabulary_has_fewer_candidates(make_batch: Any) -> None:
    entry = make_batch(3, [searching(5)]).sample([[0.0, 2.0, 1.0]]).logprobs[0]
    assert entry.top_token_ids == (1, 2, 0)


def test_beam_rows_and_others_do_not_meet(make_batch: Any) -> None:
    crowd = [searching(2, 0.5), sampled(seed=3, temperature=0.5, logprobs=4), searching(6, 2.0)]
    lines = np.random.default_rng(7).normal(size=(3, V)).astype(np.float32)
    together = make_batch(V, crowd).sample(lines)
    for row, sequence in enumerate(crowd):
        alone = make_batch(V, [sequence]).sample(lines[row : row + 1])
        assert alone.token_ids[0] == together.token_ids[row]
        assert alone.logprobs[0] == together.logprobs[row]


def test_a_row_that_was_a_beam_samples_again(make_batch: Any) -> None:
    line = np.random.default_rng(8).normal(size=(1, V)).astype(np.float32)
    batch = make_batch(V, [searching(4, 0.3)])
    batch.sample(line)
    plain = sampled(seed=2, logprobs=1)
    batch.sampler.rows.set_row(0, plain[0], 0, 1)
    assert batch.sample(line).logprobs == make_batch(V, [plain]).sample(line).logprobs


def test_the_position_alone_changes_the_sample(make_batch: Any) -> None:
    batch = make_batch(V, [sampled(seed=1)])
    drawn = []
    for _ in range(30):
        drawn.append(int(batch.sample(np.zeros((1, V))).token_ids[0]))
        batch.append(0, 0)
    assert len(set(drawn)) > 8
    batch.history.num_tokens[0] = 1
    assert int(batch.sample(np.zeros((1, V))).token_ids[0]) == drawn[0]


def test_seeds_and_branches_differ(make_batch: Any) -> None:
    rows = 40
    seeds = make_batch(V, [sampled(seed=seed) for seed in range(rows)])
    branches = make_batch(V, [sampled(seed=1)] * rows, list(range(rows)))
    for batch in (seeds, branches):
        assert len(set(batch.sample(np.zeros((rows, V))).token_ids.tolist())) > 10


def test_derived_state_is_kept_until_rows_or_options_change(make_batch: Any) -> None:
    batch = make_batch(V, [greedy(logit_bias=((5, 9.0),)), greedy(), greedy()])
    sampler: Sampler = batch.sampler
    lines = np.eye(2, V)
    for rows in ([0, 1], [0, 1], [1, 2], [0, 1]):
        batch.sample(lines, rows)
    assert [bound.rows.tolist() for bound in sampler._bound.values()] == [[0, 1], [1, 2]]
    assert batch.sample(lines, [0, 1]).token_ids.tolist() == [5, 1]
    sampler.rows.set_row(0, greedy()[0], 0, 1)
    assert batch.sample(lines, [0, 1]).token_ids.tolist() == [0, 1]
    sampler.rows.set_row(1, greedy(allowed_token_ids=(8,))[0], 0, 1)
    assert batch.sample(lines, [0, 1]).token_ids.tolist() == [0, 8]
    sampler.rows.clear_row(1)
    assert batch.sample(lines, [0, 1]).token_ids.tolist() == [0, 1]


def test_derived_state_is_kept_for_few_sets_of_rows(make_batch: Any) -> None:
    batch = make_batch(V, [greedy(logit_bias=((row, 9.0),)) for row in range(6)])
    for rows in permutations(range(6), 2):
        assert batch.sample(np.eye(2, V), rows).token_ids.tolist() == list(rows)
        assert len(batch.sampler._bound) <= MAX_BOUND


def test_the_runners_reused_row_array_is_not_kept(make_batch: Any) -> None:
    batch = make_batch(V, [greedy(), greedy(logprobs=0)])
    rows = np.array([0, 1])
    first = batch.sampler.sample(torch.eye(2, V), rows, batch.history)
    assert list(first.logprobs) == [1]
    rows[:] = [1, 0]
    second = batch.sampler.sample(torch.eye(2, V), rows, batch.history)
    assert list(second.logprobs) == [1]
    assert second.logprobs[1].token_id == 0


def test_listed_tokens_have_the_models_log_probabilities(make_batch: Any) -> None:
    """Those of torch's log_softmax, in the order asked for, before any option, whatever is asked
    of the other rows."""
    listed = (7, 0, V - 1, 3)
    lines = torch.randn((4, V), generator=torch.Generator().manual_seed(1)) * 6
    wild = sampled(seed=2, logprobs=0, logprob_token_ids=listed, logit_bias=((3, 9.0),))
    crowd = [sampled(logprobs=3), wild, greedy(), greedy(logprobs=0, logprob_token_ids=(5,))]
    result = make_batch(V, crowd).sample(lines)
    entry, expected = result.logprobs[1], lines[1].log_softmax(0)
    assert entry.top_token_ids == listed
    assert entry.top_logprobs == pytest.approx(expected[list(listed)].tolist(), abs=4e-6)
    assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=4e-6)
    assert entry.rank == 1 + int((lines[1] > lines[1][entry.token_id]).sum())
    assert result.logprobs[3].top_token_ids == (5,)
    assert len(result.logprobs[0].top_token_ids) == 3
    for row in (0, 1, 3):
        assert (
            make_batch(V, crowd).sample(lines[row : row + 1], [row]).logprobs[row]
            == (result.logprobs[row])
        )


def test_a_listed_token_that_is_sampled_or_impossible(make_batch: Any) -> None:
    line = [[0.1, 2.7, -INF, 1.3]]
    batch = make_batch(4, [greedy(logprobs=0, logprob_token_ids=(1, 2))])
    entry = batch.sample(line).logprobs[0]
    assert (entry.token_id, entry.rank) == (1, 1)
    assert entry.top_logprobs == (entry.logprob, -INF)
    batch.sampler.rows.clear_row(0)
    batch.sampler.rows.set_row(0, greedy(logprobs=1)[0], 0, 1)
    assert batch.sample(line).logprobs[0].top_token_ids == (1,)


def test_no_rows(make_batch: Any) -> None:
    for crowd in ([greedy()], [sampled(logprobs=1)]):
        result = make_batch(V, crowd).sample(np.zeros((0, V)), [])
        assert len(result.token_ids) == 0
        assert not result.failed


def test_prompt_logprobs_asked_for() -> None:
    rows = SamplingRows(3, V)
    rows.set_row(0, DecodingParams(max_tokens=1, prompt_logprobs=4), 0, 3)
    rows.set_row(1, DecodingParams(max_tokens=1, prompt_logprobs=0), 0, 3)
    rows.set_row(2, DecodingParams(max_tokens=1), 0, 3)
    assert [rows.num_prompt_logprobs(row) for row in range(3)] == [4, 0, None]


def test_the_results_are_plain_numbers(make_batch: Any) -> None:
    result = make_batch(V, [sampled(logprobs=1), greedy()]).sample(np.zeros((2, V)))
    assert result.token_ids.dtype == np.int64
    entry = result.logprobs[0]
    assert type(entry.token_id) is int
    assert type(entry.logprob) is float
    assert type(entry.rank) is int


@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_number_of_threads_changes_nothing(make_batch: Any, num_threads: int) -> None:
    rng = np.random.default_rng(4)
    vocab_size, num_rows = 9001, 16
    lines = (rng.normal(size=(num_rows, vocab_size)) * 2).astype(np.float32)
    crowd = [
        (DecodingParams(max_tokens=1, seed=row, top_p=top_p, logprobs=2), [1], [])
        for row, top_p in enumerate([1.0, 0.9, 0.5, 0.1] * 4)
    ]
    expected = make_batch(vocab_size, crowd).sample(lines)
    torch.set_num_threads(num_threads)
    found = make_batch(vocab_size, crowd).sample(lines)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.logprobs == expected.logprobs
