"""Drafts change neither a token nor a bit of a log-probability, right or wrong, on real kernels.

The sequences' true continuations are those of the same sequences computed alone, one token a step.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engine.checkpoints import save_checkpoint
from tests.runtime.hand_core import HandCore, Held
from tests.runtime.real_runner import Made, load

from quire.core.kv_groups import KVKind
from quire.core.pooling import PoolingParams
from quire.core.sampling_params import DecodingParams
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.runtime import model_runner
from quire.runtime.model_runner import ModelRunner

NUM_SAMPLED = 14
Drafts = dict[int, tuple[int, ...]]

GREEDY = DecodingParams(max_tokens=40, temperature=0.0, logprobs=3)
# Strong enough that a wrong count of any token changes what comes next.
PENALIZED = replace(GREEDY, repetition_penalty=1.3, frequency_penalty=1.5, presence_penalty=0.5)
PARAMS = {
    "greedy": GREEDY,
    "penalized": PENALIZED,
    "sampled": replace(GREEDY, temperature=1.0, seed=5, logprobs=0),
    "all": replace(
        PENALIZED,
        temperature=1.4,
        seed=8,
        top_p=0.95,
        top_k=300,
        min_p=0.001,
        logit_bias=((700, 2.0),),
        bad_words=((900,), (700, 700)),
        min_tokens=9,
        end_token_ids=(2, 3, 700),
        logprob_token_ids=(5, 6, 7),
    ),
    # The next two are sampled at all positions at once.
    "plain": replace(GREEDY, logprobs=None),
    "plain sampled": replace(GREEDY, temperature=1.0, top_p=0.95, seed=3, logprobs=None),
    "without logprobs": replace(PENALIZED, temperature=0.8, seed=2, logprobs=None),
}


@pytest.fixture(scope="module", params=["embedded", "int8 KV", "windows"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    if request.param == "windows":
        return load(save_checkpoint("qwen2", tmp_path_factory.mktemp("qwen2")))
    return load(EMBEDDED_MODEL, kv_cache_dtype="int8" if request.param == "int8 KV" else "auto")


@pytest.fixture(scope="module")
def embedded() -> Made:
    return load(EMBEDDED_MODEL)


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4, 1000) for _ in range(length)]


def mask_after(tokens: Sequence[int]) -> bytes:
    """A grammar: a third of the tokens, by the last token and by how many tokens there are."""
    rest = (tokens[-1] + len(tokens)) % 3
    bits = sum(1 << token for token in range(1000) if token % 3 == rest)
    return bits.to_bytes(125, "little")


def masks_of(rows: Mapping[int, Held], drafts: Drafts) -> dict[int, list[bytes]]:
    """The masks of rows with a grammar, at all positions at which they may sample."""
    found = {}
    for row, held in rows.items():
        known = [*held.tokens, *drafts.get(row, ())]
        first = len(held.tokens)
        found[row] = [mask_after(known[:end]) for end in range(first, len(known) + 1)]
    return found


def alone(
    made: Made,
    tokens: Sequence[int],
    params: DecodingParams,
    *,
    branch_index: int = 0,
    has_grammar: bool = False,
    count: int = NUM_SAMPLED,
) -> Held:
    """All tokens in one step and nothing beside, then one token a step; blocks of another size."""
    core = made.make(block_size=16)
    held = core.admit(tokens, params, branch_index=branch_index)
    for _ in range(count):
        core.step(masks=masks_of({held.row: held}, {}) if has_grammar else None)
    assert held.num_computed == len(held.tokens) - 1
    return held


def assert_same(found: Held, expected: Held) -> None:
    """The one may have sampled a few tokens more than the other."""
    count = min(len(found.sampled), len(expected.sampled))
    assert count >= NUM_SAMPLED
    assert found.sampled[:count] == expected.sampled[:count]
    has_logprobs = expected.params.logprobs is not None
    assert len(found.entries) == (len(found.sampled) if has_logprobs else 0)
    assert found.entries[:count] == expected.entries[:count]


def continuation(held: Held, expected: Held, count: int) -> tuple[int, ...]:
    first = len(held.tokens)
    return tuple(expected.tokens[first : first + count])


@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize(
    ("num_drafts", "num_right"), [(1, 0), (1, 1), (4, 0), (4, 1), (4, 2), (4, 3), (4, 4)]
)
def test_a_step_ends_with_the_first_wrong_draft(
    embedded: Made, num_drafts: int, num_right: int, num_before: int
) -> None:
    tokens = prompt(13, 1)
    expected = alone(embedded, tokens, GREEDY)
    core = embedded.make()
    held = core.admit(tokens, GREEDY)
    for _ in range(num_before):  # else the prompt and the drafts are one chunk
        core.step()
    drafts = list(continuation(held, expected, num_drafts))
    if num_right < num_drafts:
        drafts[num_right] = (drafts[num_right] + 1) % 1000  # and the drafts behind it are right
    result = core.step(drafts={held.row: tuple(drafts)})
    assert list(result.rows) == [held.row]
    assert len(result.token_ids[0]) == len(result.logprobs[held.row]) == num_right + 1
    assert held.tokens == expected.tokens[: len(tokens) + num_before + num_right + 1]
    while len(held.sampled) < NUM_SAMPLED:
        core.step()
    assert_same(held, expected)


def test_a_plain_row_is_sampled_once_behind_all_its_drafts(
    embedded: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = PARAMS["plain sampled"]
    tokens = prompt(13, 1)
    expected = alone(embedded, tokens, params)
    core = embedded.make()
    held = core.admit(tokens, params)
    core.step()
    sampler = core.runner._sampler
    calls: list[int] = []
    plain = sampler.sample

    def counted(logits: torch.Tensor, *given: Any) -> Any:
        calls.append(len(logits))
        return plain(logits, *given)

    monkeypatch.setattr(sampler, "sample", counted)
    result = core.step(drafts={held.row: continuation(held, expected, 6)})
    assert [len(found) for found in result.token_ids] == [7]
    assert calls == [1]
    assert held.tokens == expected.tokens[: len(held.tokens)]


class Crowd:
    """Sequences of all kinds in one core, with what each would be alone."""

    def __init__(self, made: Made, core: HandCore, rng: random.Random) -> None:
        self.made, self.core, self.rng = made, core, rng
        self.expected: dict[int, Held] = {}
        self.with_grammar: dict[int, Held] = {}

    def admit(self, seed: int, params: DecodingParams, *, has_grammar: bool = False) -> Held:
        tokens = prompt(self.rng.randrange(2, 40), seed)
        held = self.core.admit(tokens, params, branch_index=seed)
        self.expected[held.row] = alone(
            self.made, tokens, params, branch_index=seed, has_grammar=has_grammar, count=40
        )
        if has_grammar:
            self.with_grammar[held.row] = held
        return held

    def drafts(self, held: Held) -> tuple[int, ...]:
        """Some true tokens, and mostly an error behind them, and perhaps more true tokens."""
        rng = self.rng
        drafts = list(continuation(held, self.expected[held.row], rng.randrange(7)))
        if drafts and rng.random() < 0.6:
            drafts[rng.randrange(len(drafts))] = rng.randrange(4, 1000)
        return tuple(drafts)

    def step(self) -> None:
        """Each row pauses, computes a part of its gap, or closes it, with drafts or without."""
        counts, drafts = {}, {}
        for held in self.core.live:
            gap = len(held.tokens) - held.num_computed
            counts[held.row] = self.rng.choice((0, gap, gap, gap, self.rng.randrange(gap + 1)))
            if counts[held.row] == gap and (found := self.drafts(held)):
                drafts[held.row] = found
        if any(counts.values()):
            masks = masks_of(self.with_grammar, drafts)
            self.core.step(counts, drafts=drafts, masks=masks)

    def fork(self) -> Held:
        """A prompt of its own and a branch that joins the step that ends it."""
        source = self.admit(50, PARAMS["sampled"])
        branch = self.core.fork(source, PARAMS["all"], 51, joins_step=True)
        self.expected[branch.row] = alone(
            self.made, source.tokens, PARAMS["all"], branch_index=51, count=40
        )
        drafts = {held.row: self.drafts(held) for held in self.core.live[:-2]}
        self.core.step(
            drafts={row: found for row, found in drafts.items() if found},
            masks=masks_of(self.with_grammar, drafts),
            joins=[(branch, source)],
        )
        self.core.part(branch)
        return branch


@pytest.mark.parametrize("seed", range(3))
def test_a_crowd_with_drafts_gets_what_each_gets_alone(made: Made, seed: int) -> None:
    rng = random.Random(seed)
    core = made.make()
    assert core.runner.is_native
    crowd = Crowd(made, core, rng)
    for index, params in enumerate(PARAMS.values()):
        crowd.admit(10 * seed + index, params)
    crowd.admit(99, PARAMS["penalized"], has_grammar=True)
    for _ in range(3):
        crowd.step()
    crowd.fork()
    for _ in range(60):
        if all(len(held.sampled) >= NUM_SAMPLED for held in core.live):
            break
        for held in list(core.live):
            if len(held.sampled) > 30:  # its row is taken by nobody
                core.drop(held)
                assert_same(held, crowd.expected[held.row])
                crowd.with_grammar.pop(held.row, None)
        crowd.step()
    assert core.live
    for held in core.live:
        assert_same(held, crowd.expected[held.row])
    if any(group.kind is KVKind.WINDOW for group in core.groups):
        assert any(-1 in table for held in core.live for table in held.tables)


def test_prompt_logprobs_and_pooled_rows_beside_drafts(embedded: Made) -> None:
    pooling = DecodingParams(max_tokens=1, pooling=PoolingParams())
    asking = replace(PENALIZED, prompt_logprobs=2)
    tokens, others, pooled = prompt(13, 1), prompt(9, 2), prompt(11, 3)
    expected, beside = alone(embedded, tokens, asking), alone(embedded, others, GREEDY)
    plain = [embedded.make() for _ in range(2)]
    vectors = plain[0].admit(pooled, pooling) and plain[0].step().pooled
    entries = plain[1].admit(tokens, asking) and plain[1].step().prompt_logprobs
    core = embedded.make()
    decoding = core.admit(others, GREEDY)
    core.step()
    pooling_row = core.admit(pooled, pooling).row
    held = core.admit(tokens, asking)
    drafts = {
        each.row: continuation(each, whole, 4)
        for each, whole in ((held, expected), (decoding, beside))
    }
    result = core.step(drafts=drafts)
    assert result.pooled == {pooling_row: vectors[0]}
    assert result.prompt_logprobs == {held.row: entries[0]}
    found = dict(zip(result.rows, result.token_ids, strict=True))
    assert [len(found[row]) for row in (decoding.row, held.row, pooling_row)] == [5, 5, 0]
    for each, whole in ((held, expected), (decoding, beside)):
        assert each.entries == whole.entries[: len(each.entries)]


def test_more_drafts_than_logits_at_once(embedded: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "PROMPT_LOGPROB_ROWS", 5)
    sizes: list[int] = []
    core = embedded.make()
    plain = core.runner._forward.logits

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return plain(hidden)

    monkeypatch.setattr(core.runner._forward, "logits", watched)
    prompts = [prompt(9, seed) for seed in range(3)]
    expected = [alone(embedded, tokens, PENALIZED) for tokens in prompts]
    rows = [core.admit(tokens, PENALIZED) for tokens in prompts]
    core.step()
    drafts = {
        held.row: continuation(held, whole, number)
        for held, whole, number in zip(rows, expected, (1, 2, 4), strict=True)
    }
    core.step(drafts=drafts)
    assert sizes == [3, 3, 3, 2, 1, 1]
    while len(rows[0].sampled) < NUM_SAMPLED:
        core.step(drafts={rows[0].row: continuation(rows[0], expected[0], 1)})
    assert set(sizes[6:]) == {4}
    for held, whole in zip(rows, expected, strict=True):
        assert held.sampled[:NUM_SAMPLED] == whole.sampled[: len(held.sampled)][:NUM_SAMPLED]


def broken_at(monkeypatch: pytest.MonkeyPatch, runner: ModelRunner, lines: list[int]) -> None:
    """The next call for logits has NaN in these lines."""
    plain: Callable[[torch.Tensor], torch.Tensor] = runner._forward.logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        logits = plain(hidden)
        while lines:
            logits[lines.pop()] = float("nan")
        return logits

    monkeypatch.setattr(runner._forward, "logits", broken)


@pytest.mark.parametrize("name", ["penalized", "plain"])
def test_a_row_without_usable_logits_behind_a_draft_keeps_the_tokens_before(
    embedded: Made, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [prompt(9, seed) for seed in range(2)]
    expected = [alone(embedded, each, PARAMS[name]) for each in tokens]
    core = embedded.make()
    rows = [core.admit(each, PARAMS[name]) for each in tokens]
    core.step()
    drafts = {
        held.row: continuation(held, whole, 3) for held, whole in zip(rows, expected, strict=True)
    }
    # Lines: both rows, their first drafts, and the second draft of the first row.
    broken_at(monkeypatch, core.runner, [4])
    result = core.step(drafts=drafts)
    assert [len(found) for found in result.token_ids] == [2, 4]
    while len(rows[0].sampled) < NUM_SAMPLED:
        core.step()
    for held, whole in zip(rows, expected, strict=True):
        assert held.sampled[:NUM_SAMPLED] == whole.sampled
        assert held.entries[:NUM_SAMPLED] == whole.entries


def test_drafts_come_with_a_closed_gap(embedded: Made) -> None:
    core = embedded.make()
    held = core.admit(prompt(9, 1), GREEDY)
    with pytest.raises(AssertionError, match="drafts follow an open gap"):
        core.step({held.row: 4}, drafts={held.row: (5, 6)})
