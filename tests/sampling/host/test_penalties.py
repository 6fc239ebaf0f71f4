"""Penalties against their definitions, and counts that follow tokens through everything."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.core.sampling_params import DecodingParams
from quire.sampling.host.history import TokenHistory
from quire.sampling.host.processors import Penalties, TokenCounts

V = 12
CPU = torch.device("cpu")


def by_definition(
    logits: np.ndarray, params: DecodingParams, prompt: list[int], output: list[int]
) -> np.ndarray:
    """One row, token by token, in fp32."""
    line = logits.astype(np.float32).copy()
    counts = Counter(output)
    repetition = np.float32(params.repetition_penalty)
    for token in set(prompt) | set(output):
        line[token] = line[token] / repetition if line[token] > 0 else line[token] * repetition
        line[token] -= np.float32(params.frequency_penalty) * np.float32(counts[token])
        line[token] -= np.float32(params.presence_penalty) * np.float32(counts[token] > 0)
    return line


def history_of(sequences: list[list[int]]) -> TokenHistory:
    token_ids = np.zeros((len(sequences), 128), dtype=np.int32)
    for row, tokens in enumerate(sequences):
        token_ids[row, : len(tokens)] = tokens
    return TokenHistory(token_ids, np.array([len(tokens) for tokens in sequences]))


def test_definitions_over_rows_that_differ() -> None:
    rng = np.random.default_rng(3)
    wanted = [(1.3, 0.0, 0.0), (1.0, 0.7, 0.0), (1.0, 0.0, -0.4), (0.8, -1.5, 2.0), (1.0, 0.0, 0.0)]
    prompts = [rng.integers(0, V, rng.integers(1, 20)).tolist() for _ in wanted]
    outputs = [rng.integers(0, V, length).tolist() for length in (0, 1, 9, 40, 3)]
    penalties = Penalties(V)
    options = []
    for row, (repetition, frequency, presence) in enumerate(wanted):
        options.append(
            DecodingParams(
                max_tokens=1,
                repetition_penalty=repetition,
                frequency_penalty=frequency,
                presence_penalty=presence,
            )
        )
        penalties.set_row(row, options[row], len(prompts[row]))
    rows = np.array([3, 4, 0, 2, 1])
    logits = torch.from_numpy(rng.normal(size=(5, V)).astype(np.float32))
    logits[0, 5] = float("-inf")
    before = logits.numpy().copy()
    bound = penalties.bind(rows, CPU)
    assert bound is not None
    pairs = zip(prompts, outputs, strict=True)
    bound(logits, history_of([prompt + output for prompt, output in pairs]))
    for line, row in enumerate(rows):
        expected = by_definition(before[line], options[row], prompts[row], outputs[row])
        assert logits[line].numpy().tolist() == expected.tolist()


def test_rows_without_penalties_cost_nothing() -> None:
    penalties = Penalties(V)
    penalties.set_row(0, DecodingParams(max_tokens=1), 4)
    assert penalties.bind(np.array([0]), CPU) is None


def test_a_row_that_is_set_again_starts_anew() -> None:
    penalties = Penalties(V)
    params = DecodingParams(max_tokens=1, presence_penalty=1.0)
    for sequence in ([1, 2, 3], [5, 6, 6]):
        penalties.set_row(0, params, 1)
        logits = torch.zeros(1, V)
        bound = penalties.bind(np.array([0]), CPU)
        assert bound is not None
        bound(logits, history_of([sequence]))
        assert np.flatnonzero(logits[0].numpy()).tolist() == sorted(set(sequence[1:]))


def test_many_distinct_tokens_grow_the_list() -> None:
    counts = TokenCounts(1000)
    slot = np.array([counts.reserve_slot()])
    history = TokenHistory(np.arange(1000, dtype=np.int32)[None, :], np.array([1]))
    for length in (1, 2, 63, 64, 65, 66, 900, 901):
        history.num_tokens[0] = length
        counts.follow(slot, np.array([0]), np.array([1]), history)
        tokens, times = counts.seen(slot)
        assert sorted(tokens[0].tolist()) == list(range(length))
        assert times[0].sum() == length - 1


class FollowingCounts(RuleBasedStateMachine):
    """Rows come, grow by one or many tokens, shrink and go; the counts equal a recount."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = TokenCounts(V)
        self.token_ids = np.zeros((6, 200), dtype=np.int32)
        self.history = TokenHistory(self.token_ids, np.zeros(6, dtype=np.int64))
        self.live: dict[int, tuple[int, int]] = {}  # row -> (slot, num_prompt_tokens)

    @precondition(lambda self: len(self.live) < 6)
    @rule(prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=8))
    def enter(self, prompt: list[int]) -> None:
        row = next(row for row in range(6) if row not in self.live)
        self.live[row] = (self.counts.reserve_slot(), len(prompt))
        self.token_ids[row, : len(prompt)] = prompt
        self.history.num_tokens[row] = len(prompt)

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 5))
    def leave(self, choice: int) -> None:
        row = sorted(self.live)[choice % len(self.live)]
        self.counts.release(self.live.pop(row)[0])

    @rule(tokens=st.lists(st.integers(0, V - 1), min_size=6, max_size=6))
    def each_grows_by_one(self, tokens: list[int]) -> None:
        for row in self.live:
            self._append(row, [tokens[row]])

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 5), tokens=st.lists(st.integers(0, V - 1), max_size=5))
    def one_grows_by_several(self, choice: int, tokens: list[int]) -> None:
        self._append(sorted(self.live)[choice % len(self.live)], tokens)

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 5), fraction=st.floats(0, 1))
    def one_is_cut(self, choice: int, fraction: float) -> None:
        row = sorted(self.live)[choice % len(self.live)]
        num_prompt = self.live[row][1]
        generated = int(self.history.num_tokens[row]) - num_prompt
        self.history.num_tokens[row] = num_prompt + int(fraction * generated)

    def _append(self, row: int, tokens: list[int]) -> None:
        start = int(self.history.num_tokens[row])
        if start + len(tokens) <= self.token_ids.shape[1]:
            self.token_ids[row, start : start + len(tokens)] = tokens
            self.history.num_tokens[row] += len(tokens)

    @invariant()
    def counts_equal_a_recount(self) -> None:
        if not self.live:
            return
        rows = np.array(sorted(self.live))
        slots, num_prompt = np.array([self.live[row] for row in rows.tolist()]).T
        self.counts.follow(slots, rows, num_prompt, self.history)
        tokens, times = self.counts.seen(slots)
        for line, row in enumerate(rows.tolist()):
            whole = self.token_ids[row, : self.history.num_tokens[row]].tolist()
            generated = Counter(whole[self.live[row][1] :])
            found = dict(zip(tokens[line].tolist(), times[line].tolist(), strict=True))
            assert found == {token: generated[token] for token in whole}


# After a cut the same length may be reached with other tokens only through `follow` in between,
# as in the runner, which samples at every step; the invariant above does just that.
FollowingCounts.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestFollowingCounts = FollowingCounts.TestCase


def test_slots_are_used_again() -> None:
    counts = TokenCounts(V)
    first = [counts.reserve_slot() for _ in range(9)]
    assert sorted(first) == list(range(9))
    counts.release(first[4])
    assert counts.reserve_slot() == first[4]


@pytest.mark.parametrize("value", [1.0, 0.5])
def test_an_impossible_token_stays_impossible(value: float) -> None:
    penalties = Penalties(V)
    params = DecodingParams(max_tokens=1, repetition_penalty=value, presence_penalty=-2.0)
    penalties.set_row(0, params, 1)
    logits = torch.full((1, V), float("-inf"))
    bound = penalties.bind(np.array([0]), CPU)
    assert bound is not None
    bound(logits, history_of([[1, 2]]))
    assert bool((logits == float("-inf")).all())


def test_a_slot_takes_memory_when_it_first_counts() -> None:
    """Where a device counts, nobody does here."""
    counts = TokenCounts(V)
    slots = np.array([counts.reserve_slot() for _ in range(9)])
    counts.release(8)
    assert counts._table.nbytes == 0
    counts.follow(slots[7:8], np.array([0]), np.array([2]), history_of([[3, 4, 4]]))
    tokens, times = counts.seen(slots[7:8])
    assert dict(zip(tokens[0].tolist(), times[0].tolist(), strict=True)) == {3: 0.0, 4: 1.0}
