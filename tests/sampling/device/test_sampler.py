"""The sampler of a device, in the interpreter, against that of the host: tokens, entries, state."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from tests.sampling.devices import CPU, DeviceBatch, make_device_batch
from tests.sampling.host import test_sampler as host_tests
from tests.sampling.host.test_sampler import (
    INF,
    Sequence,
    V,
    greedy,
    masks_or_none,
    sampled,
    searching,
    sequences,
)
from triton.runtime.interpreter import InterpretedFunction

from quire.core.sampling_params import DecodingParams
from quire.core.step import TokenLogprobs
from quire.kernels.transfers import DeviceLink, Download
from quire.kernels.triton.sampling import (
    edit_logits,
    gumbel_sample,
    penalties,
    scan_logits,
    token_logprobs,
)
from quire.sampling.device.history import DeviceHistory
from quire.sampling.device.sampler import DeviceSampler, warm_up
from quire.sampling.host.history import TokenHistory
from quire.sampling.host.sampler import NO_TOKEN, SampledTokens, Sampler, SamplingRows

# The same tests for both samplers, here with the fixture below.
test_broken_logits_are_seen = host_tests.test_broken_logits_are_seen_where_options_would_hide_them
test_minus_infinity_everywhere = host_tests.test_minus_infinity_everywhere_is_broken_too
test_no_token_left = host_tests.test_a_row_whose_options_leave_no_token_fails_alone
test_lowest_of_equal_tokens = host_tests.test_greedy_takes_the_lowest_of_equal_tokens
test_beams_candidates = host_tests.test_a_beam_row_has_its_candidates_at_its_temperature
test_equal_candidates = host_tests.test_equal_candidates_come_in_the_order_of_their_ids
test_tiny_vocabulary = host_tests.test_a_tiny_vocabulary_has_fewer_candidates
test_beam_rows_and_others = host_tests.test_beam_rows_and_others_do_not_meet
test_beam_row_samples_again = host_tests.test_a_row_that_was_a_beam_samples_again
test_plain_numbers = host_tests.test_the_results_are_plain_numbers
test_listed_tokens = host_tests.test_listed_tokens_have_the_models_log_probabilities
test_listed_and_sampled = host_tests.test_a_listed_token_that_is_sampled_or_impossible
test_no_rows = host_tests.test_no_rows


@pytest.fixture
def make_batch() -> Any:
    return make_device_batch


def host_sample(
    vocab_size: int, crowd: list[Sequence], lines: np.ndarray, masks: Any = None
) -> SampledTokens:
    """By the host's sampler, line i for sequence i."""
    rows = SamplingRows(len(crowd), vocab_size)
    token_ids = np.zeros((len(crowd), 64), dtype=np.int32)
    lengths = np.zeros(len(crowd), dtype=np.int64)
    for row, (params, prompt, output) in enumerate(crowd):
        rows.set_row(row, params, 0, len(prompt))
        lengths[row] = len(prompt) + len(output)
        token_ids[row, : lengths[row]] = [*prompt, *output]
    history = TokenHistory(token_ids, lengths)
    logits = torch.from_numpy(lines.copy())
    return Sampler(rows).sample(logits, np.arange(len(crowd)), history, masks)


def assert_equal_entries(
    found: Mapping[int, TokenLogprobs], expected: Mapping[int, TokenLogprobs]
) -> None:
    """Log-probabilities differ by rounding; all else is equal."""
    assert found.keys() == expected.keys()
    for row, entry in expected.items():
        mine = found[row]
        assert (mine.token_id, mine.rank) == (entry.token_id, entry.rank)
        assert mine.top_token_ids == entry.top_token_ids
        values = (entry.logprob, *entry.top_logprobs)
        assert (mine.logprob, *mine.top_logprobs) == pytest.approx(values, rel=1e-5, abs=2e-6)


@settings(max_examples=12)
@given(
    crowd=st.lists(st.tuples(sequences, masks_or_none), min_size=1, max_size=5),
    salt=st.integers(0, 1 << 30),
)
def test_equals_the_hosts_and_alone_equals_in_a_crowd(
    crowd: list[tuple[Sequence, bytes | None]], salt: int
) -> None:
    lines = (np.random.default_rng(salt).normal(size=(len(crowd), V)) * 3).astype(np.float32)
    everyone = [sequence for sequence, _ in crowd]
    masks = {row: mask for row, (_, mask) in enumerate(crowd) if mask is not None}
    together = make_device_batch(V, everyone).sample(lines, masks=masks)
    expected = host_sample(V, everyone, lines, masks)
    assert together.token_ids.tolist() == expected.token_ids.tolist()
    assert together.failed == expected.failed
    assert_equal_entries(together.logprobs, expected.logprobs)
    row = salt % len(crowd)
    alone = make_device_batch(V, everyone[row : row + 1]).sample(
        lines[row : row + 1], masks={0: masks[row]} if row in masks else None
    )
    assert alone.token_ids[0] == together.token_ids[row]
    assert alone.logprobs.get(0) == together.logprobs.get(row)


KEEPS_STATE = [
    sampled(seed=1, repetition_penalty=1.7, frequency_penalty=0.6),
    greedy(presence_penalty=1.5, bad_words=((3, 4), (5,), (6, 6, 7))),
    sampled(seed=3, min_tokens=4, end_token_ids=(2, 9), stop_token_ids=(2,)),
    greedy(frequency_penalty=0.9, logprobs=2, logit_bias=((4, 1.5), (8, -3.0))),
    greedy(),
    sampled(seed=4, presence_penalty=-0.5, allowed_token_ids=(1, 3, 4, 8)),
    greedy(repetition_penalty=1.3),
    greedy(repetition_penalty=2.0, presence_penalty=0.1),
]


def test_kept_sampler_state_equals_state_derived_from_the_tokens() -> None:
    """Rows come and go between the steps; each step equals one of a sampler that begins afresh."""
    rng = np.random.default_rng(0)
    kept = make_device_batch(V, KEEPS_STATE)
    outputs: list[list[int]] = [[] for _ in KEEPS_STATE]
    for step in range(7):
        rows = rng.permutation(8)[: 8 - step % 3] if step < 5 else np.arange(8)
        lines = (rng.normal(size=(len(rows), V)) * 2).astype(np.float32)
        found = kept.sample(lines, rows)
        chosen = [(*KEEPS_STATE[row][:2], outputs[row]) for row in rows]
        expected = host_sample(V, chosen, lines)
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        for row, token_id in zip(rows.tolist(), found.token_ids.tolist(), strict=True):
            kept.append(row, token_id)
            outputs[row].append(token_id)


def test_counts_start_anew_with_a_row_and_where_one_got_shorter() -> None:
    sequence = greedy(frequency_penalty=1.0)
    batch = make_device_batch(V, [(sequence[0], [1], [4, 4, 4]), greedy()])
    lines = np.zeros((2, V), np.float32)
    lines[0, 4], lines[0, 7] = 2.5, 1.0
    assert batch.sample(lines).token_ids[0] == 7  # 2.5 - 3 < 1
    batch.history.num_tokens[0] = 3
    assert batch.sample(lines).token_ids[0] == 7  # 2.5 - 2 < 1
    batch.history.num_tokens[0] = 2
    assert batch.sample(lines).token_ids[0] == 4
    batch.history.num_tokens[0] = 4
    batch.sampler.rows.set_row(0, sequence[0], 0, 4)  # all of them are the prompt's now
    assert batch.sample(lines).token_ids[0] == 4
    batch.sampler.rows.clear_row(0)
    batch.sampler.rows.set_row(1, sequence[0], 0, 1)
    assert batch.sample(lines).token_ids.tolist() == [4, 0]


class CountingLink(DeviceLink):
    """Which copies were begun."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.copies: list[str] = []

    def upload(self, values: Any) -> torch.Tensor:
        self.copies.append("up")
        return super().upload(values)

    def download(self, values: torch.Tensor) -> Download:
        self.copies.append("down")
        return super().download(values)


class Unwaited(TorchDispatchMode):
    """Fails where torch would wait for a device: a value, a mask or a copy is read by the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = ("_local_scalar_dense", "nonzero", "masked_select", "_to_copy", "equal")
        assert func.__name__.partition(".")[0] not in waits, func.__name__
        return func(*args, **(kwargs or {}))


def test_a_steady_step_is_one_copy_each_way_and_waits_for_nothing() -> None:
    crowd = [*KEEPS_STATE[:3], searching(3, 0.5), sampled(top_k=3, top_p=0.5, logprobs=3)]
    batch = make_device_batch(V, crowd)
    link = CountingLink()
    history = DeviceHistory(
        torch.from_numpy(batch.history.token_ids), np.asarray(batch.history.num_tokens)
    )
    sampler = DeviceSampler(batch.sampler.rows, history, link)
    lines = torch.randn((len(crowd), V), generator=torch.Generator().manual_seed(1))
    rows = np.arange(len(crowd))
    with Unwaited():
        sampler.sample(lines.clone(), rows)
        link.copies.clear()
        history.num_tokens[:] += 1
        pending = sampler.sample(lines.clone(), rows)
        assert link.copies == ["up", "down"]
        link.copies.clear()
        history.num_tokens[:] += 1
        sampler.sample(lines.clone(), rows, {0: b"\xff\xff\xff"})
    assert link.copies == ["up", "up", "down"]
    assert len(pending.fetch().token_ids) == len(crowd)


def test_warming_up_runs_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: set[str] = set()
    run = InterpretedFunction.run

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched.add(self.fn.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", noting)
    warm_up(V, 8, DeviceLink(CPU))
    kernels = [edit_logits, gumbel_sample, penalties, scan_logits, token_logprobs]
    names = {name for module in kernels for name in vars(module) if name.endswith("_kernel")}
    assert launched == names


def test_results_may_be_fetched_after_the_next_step() -> None:
    crowd = [sampled(seed=1, logprobs=2), greedy(frequency_penalty=1.0)]
    one_by_one, overlapped = (make_device_batch(V, crowd) for _ in range(2))
    rng = np.random.default_rng(2)
    expected: list[SampledTokens] = []
    pending = []
    for _ in range(3):
        lines = rng.normal(size=(2, V)).astype(np.float32)
        expected.append(one_by_one.sample(lines))
        one_by_one.history.num_tokens[:] += 1
        pending.append(overlapped.sampler.sample(torch.from_numpy(lines), np.arange(2)))
        overlapped.history.num_tokens[:] += 1
    for mine, other in zip(pending, expected, strict=True):
        found = mine.fetch()
        assert found.token_ids.tolist() == other.token_ids.tolist()
        assert found.logprobs == other.logprobs


def test_a_full_row_is_sampled_but_not_written() -> None:
    """As the surplus token of a sequence that has just ended."""
    batch = make_device_batch(V, [greedy(), greedy()])
    batch.history.num_tokens[0] = 64
    before = batch.history.token_ids[1].copy()
    pending = batch.sampler.sample(torch.ones((1, V)), np.array([0]))
    assert pending.fetch().token_ids.tolist() == [0]
    assert batch.history.token_ids[1].tolist() == before.tolist()


def test_a_short_mask_forbids_what_is_beyond_it() -> None:
    lines = np.arange(V, dtype=np.float32)[None]
    found = make_device_batch(V, [greedy()]).sample(lines, masks={0: b"\xff", 5: b"\x01"})
    assert found.token_ids.tolist() == [7]


def prompt_entries(batch: DeviceBatch, logits: np.ndarray, ids: list[int], k: int) -> Any:
    found = batch.sampler.prompt_logprobs(torch.from_numpy(logits), np.array(ids), k).fetch()
    rows = SamplingRows(1, logits.shape[1])
    expected = Sampler(rows).prompt_logprobs(torch.from_numpy(logits), np.array(ids), k)
    return dict(enumerate(found)), dict(enumerate(expected))


@pytest.mark.parametrize("k", [0, 1, 5, V + 3])
def test_prompt_logprobs(k: int) -> None:
    logits = np.random.default_rng(k).normal(size=(3, V)).astype(np.float32)
    logits[1] = np.round(logits[1])
    batch = make_device_batch(V, [greedy()])
    assert_equal_entries(*prompt_entries(batch, logits, [4, 0, V - 1], k))


def test_a_nan_in_a_prompt_stays_one() -> None:
    logits = np.zeros((2, V), np.float32)
    logits[0, 3] = np.nan
    found, expected = prompt_entries(make_device_batch(V, [greedy()]), logits, [4, 4], 2)
    assert np.isnan([found[0].logprob, expected[0].logprob]).all()
    assert_equal_entries({1: found[1]}, {1: expected[1]})


@pytest.mark.parametrize("value", [float("nan"), INF])
def test_a_row_with_broken_logits_fails_alone(value: float) -> None:
    crowd = [sampled(seed=7, logprobs=2), greedy(logprobs=2), sampled(seed=9, top_p=0.5)]
    lines = np.random.default_rng(0).normal(size=(3, V)).astype(np.float32)
    whole = make_device_batch(V, crowd).sample(lines)
    for row in range(3):
        broken = lines.copy()
        broken[row, 3] = value
        found = make_device_batch(V, crowd).sample(broken)
        assert list(found.failed) == [row] and "NaN or infinity" in found.failed[row]
        expected = whole.token_ids.copy()
        expected[row] = NO_TOKEN
        assert found.token_ids.tolist() == expected.tolist()
        assert found.logprobs == {k: v for k, v in whole.logprobs.items() if k != row}


def test_a_vocabulary_of_many_tiles() -> None:
    vocab_size = 9001
    lines = (np.random.default_rng(4).normal(size=(4, vocab_size)) * 2).astype(np.float32)
    crowd = [
        (DecodingParams(max_tokens=1, seed=row, top_k=top_k, top_p=top_p, logprobs=2), [1], [])
        for row, (top_k, top_p) in enumerate([(0, 1.0), (40, 0.9), (0, 0.5), (7, 1.0)])
    ]
    found = make_device_batch(vocab_size, crowd).sample(lines)
    expected = host_sample(vocab_size, crowd, lines)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert_equal_entries(found.logprobs, expected.logprobs)
