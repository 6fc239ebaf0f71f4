"""Forked and edited rows on the embedded model: they go on as rows that were admitted afresh."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from quire.attention.backends import select
from quire.attention.kv_format import KVFormat
from quire.core.sampling_params import DecodingParams
from quire.core.step import (
    BlockCopy,
    Chunk,
    EditKind,
    RowAdmission,
    RowFork,
    StepPlan,
    StepResult,
    TableEdit,
    TokenEdit,
)
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.models.checkpoints.loader import load_model
from quire.models.registry import load_config
from quire.runtime.batch import RowBatch
from quire.runtime.kv_cache import KVCache
from quire.runtime.model_runner import ModelRunner
from quire.runtime.page_layout import plan_layout
from quire.sampling.host import choice
from quire.sampling.host.sampler import HostStepSampler, Sampler, SamplingRows

CPU = torch.device("cpu")
PROMPT = [1, 600, 700, 800, 900, 1000, 1100, 1200, 1300, 1400]  # fills 2 of a second block's 8
GREEDY = DecodingParams(max_tokens=64, temperature=0.0, logprobs=3)
# Strong enough that a wrong count of any token changes what comes next.
PENALIZED = replace(GREEDY, repetition_penalty=1.3, frequency_penalty=1.5, presence_penalty=0.5)
SAMPLED = replace(PENALIZED, temperature=1.5, seed=7)
NUM_STEPS = 14


@dataclass
class Steps:
    """A runner and its memory; steps are numbered as they come."""

    runner: ModelRunner
    storage: torch.Tensor
    step_id: int = 0

    def run(self, num_rows: int, num_tokens: int, **changes) -> StepResult:
        self.runner.execute(StepPlan(self.step_id, num_rows, num_tokens, **changes))
        self.runner.sample()
        self.step_id += 1
        return self.runner.result()

    def decode(self, num_rows: int, count: int) -> dict[int, list[int]]:
        """Tokens by row of so many steps in which every row decodes."""
        results = [by_row(self.run(num_rows, num_rows)) for _ in range(count)]
        return {row: [tokens[row] for tokens in results] for row in (results[0] if results else ())}

    def prefill(self, row: int, tokens: Sequence[int], blocks: tuple[int, ...], params) -> int:
        """Admit the only row and compute all of it; the token that it samples."""
        admit = (admission(row, tokens, blocks, params),)
        size = len(tokens)
        return by_row(self.run(1, size, admit=admit, chunks=(Chunk(row, size),)))[row]

    def alone(self, tokens: Sequence[int], params: DecodingParams, count: int) -> list[int]:
        """What follows `tokens` where nothing else runs and all of them are computed at once."""
        self.runner.reset()
        first = self.prefill(3, tokens, (27, 28, 29, 30, 31), params)
        return [first, *self.decode(1, count - 1)[3]]


def by_row(result: StepResult) -> dict[int, int]:
    return {row: ids[0] for row, ids in zip(result.rows, result.token_ids, strict=True)}


def admission(
    row: int,
    tokens: Sequence[int],
    blocks: tuple[int, ...],
    params: DecodingParams,
    num_computed_tokens: int = 0,
) -> RowAdmission:
    return RowAdmission(row, tokens, len(PROMPT), num_computed_tokens, (blocks,), params)


def append(row: int, first: int, *blocks: int) -> TableEdit:
    return TableEdit(row, 0, EditKind.APPEND, first, blocks)


def replaced(row: int, first: int, *blocks: int) -> TableEdit:
    return TableEdit(row, 0, EditKind.REPLACE, first, blocks)


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    config = load_config(EMBEDDED_MODEL)
    return load_model(EMBEDDED_MODEL, config, dtype=torch.float32, device=CPU, max_model_len=128)


@pytest.fixture
def steps(model) -> Steps:
    backend = select("cpu")
    layout = plan_layout(model.attention_specs, type(backend), 8, KVFormat.plain(torch.float32))
    rows = RowBatch(num_rows=5, max_model_len=128, max_num_tokens=64, num_groups=1, block_size=8)
    kv_cache = KVCache(layout, 32, CPU)
    sampler = Sampler(SamplingRows(5, model.vocab_size))
    return Steps(
        ModelRunner(model, backend, kv_cache, rows, HostStepSampler(sampler, rows.history)),
        kv_cache.storage,
    )


@pytest.fixture
def processed(monkeypatch) -> Iterator[list[torch.Tensor]]:
    """The logits of each step, as its rows' options have left them."""
    found: list[torch.Tensor] = []
    plain = choice.first_argmax

    def recording(logits: torch.Tensor):
        found.append(logits.clone())
        return plain(logits)

    monkeypatch.setattr(choice, "first_argmax", recording)
    return found


@pytest.mark.parametrize("num_before", [0, 4, 9])
@pytest.mark.parametrize("params", [GREEDY, PENALIZED, SAMPLED], ids=["greedy", "penal", "sampled"])
def test_rows_that_join_a_step_go_on_as_if_alone(
    steps: Steps, params: DecodingParams, num_before: int
) -> None:
    branches = {2: params, 0: replace(params, logprobs=None), 4: replace(params, seed=9), 1: params}
    changes = {"admit": (admission(2, PROMPT, (3, 5), params),)}
    if num_before:
        assert steps.run(1, num_before, **changes, chunks=(Chunk(2, num_before),)).rows == ()
        changes = {}
    rest = len(PROMPT) - num_before
    if rest > 1:
        changes["chunks"] = (Chunk(2, rest),)
    others = (0, 4, 1)
    forks = tuple(RowFork(row, 2, branches[row], 10 + row, True) for row in others)
    result = steps.run(4, rest, forks=forks, **changes)
    found = {row: [token] for row, token in by_row(result).items()}
    assert sorted(result.logprobs) == [1, 2, 4]
    for row, (entry,) in result.logprobs.items():
        assert entry.top_logprobs == result.logprobs[2][0].top_logprobs
        assert entry.token_id == found[row][0]
    # The lead keeps the shared block; each of the others writes into its own copy.
    targets = dict(zip(others, (6, 7, 8), strict=True))
    copies = tuple(BlockCopy(5, target) for target in targets.values())
    edits = tuple(replaced(row, 1, target) for row, target in targets.items())
    edits += tuple(append(row, 2, 10 + row) for row in branches)
    second = by_row(steps.run(4, 4, table_edits=edits, copies=copies))
    tails = steps.decode(4, NUM_STEPS - 2)
    for row, wishes in branches.items():
        numbered = RowAdmission(
            3, PROMPT, len(PROMPT), 0, ((27, 28, 29),), wishes, 0 if row == 2 else 10 + row
        )
        steps.runner.reset()
        first = by_row(steps.run(1, 10, admit=(numbered,), chunks=(Chunk(3, 10),)))[3]
        expected = [first, *steps.decode(1, NUM_STEPS - 1)[3]]
        assert [*found[row], second[row], *tails[row]] == expected
    greedy = params.temperature == 0.0
    assert len({(*found[row], *tails[row]) for row in branches}) == (1 if greedy else 4)


def start_beams(steps: Steps, params: DecodingParams) -> list[int]:
    """Row 2 with the prompt and 3 more tokens, row 0 with something else; row 2's tokens."""
    first = steps.prefill(2, PROMPT, (3, 5), params)
    tokens = [*PROMPT, first, *steps.decode(1, 2)[2]]
    other = admission(0, [7, 8, 9], (1,), params)
    steps.run(2, 3, admit=(other,), chunks=(Chunk(0, 3), Chunk(2, 0)))
    return tokens


@pytest.mark.parametrize("params", [GREEDY, PENALIZED, SAMPLED], ids=["greedy", "penal", "sampled"])
def test_beams_that_were_reordered_go_on_as_if_alone(steps: Steps, params: DecodingParams) -> None:
    tokens = start_beams(steps, params)
    # Row 2's first child goes on in its place; the second one takes the row of a beam that died.
    edits = (TokenEdit(2, 12, (1500,)), TokenEdit(0, 12, (1600,)))
    result = steps.run(
        2,
        2,
        release=(0,),
        forks=(RowFork(0, 2, params, 0),),
        token_edits=edits,
        table_edits=(replaced(0, 1, 9), append(2, 2, 10), append(0, 2, 11)),
        copies=(BlockCopy(5, 9),),
    )
    tails = steps.decode(2, 9)
    found = {row: [token, *tails[row]] for row, token in by_row(result).items()}
    for row, last in ((2, 1500), (0, 1600)):
        assert found[row] == steps.alone([*tokens[:-1], last], params, 10)


@pytest.mark.parametrize("params", [GREEDY, PENALIZED], ids=["greedy", "penal"])
def test_a_fork_computes_bit_for_bit_what_a_fresh_admission_does(
    steps: Steps, processed: list[torch.Tensor], params: DecodingParams
) -> None:
    runs = []
    for is_forked in (True, False):
        steps.runner.reset()
        tokens = start_beams(steps, params)
        changes = {
            "release": (0,),
            "token_edits": (TokenEdit(2, 12, (tokens[-2], tokens[-1])),),
            "copies": (BlockCopy(5, 9),),
            "chunks": (Chunk(2, 2),),
        }
        fork, edit = RowFork(0, 2, params, 0), TokenEdit(0, 12, (tokens[-2],))
        if is_forked:
            changes["forks"] = (fork,)
            changes["token_edits"] += (edit,)
            changes["table_edits"] = (replaced(0, 1, 9),)
        else:
            edited = [*tokens[:-1], tokens[-2]]
            changes["admit"] = (admission(0, edited, (3, 9), params, 12),)
        processed.clear()
        result = steps.run(2, 3, **changes)
        tails = steps.decode(2, 2)
        runs.append((by_row(result), tails, dict(result.logprobs), list(processed)))
    assert runs[0][:3] == runs[1][:3]
    assert len(runs[0][3]) == 3
    assert all(
        torch.equal(first, second) for first, second in zip(runs[0][3], runs[1][3], strict=True)
    )


def test_penalties_of_a_row_that_was_cut_and_edited_equal_those_of_a_fresh_one(
    steps: Steps, processed: list[torch.Tensor]
) -> None:
    first = steps.prefill(2, PROMPT, (3, 5, 6), PENALIZED)
    tokens = [*PROMPT, first, *steps.decode(1, 7)[2]]
    # The last of its 18 tokens was not counted yet; it becomes one that was.
    tokens[17:] = [tokens[11], 1600]
    edit = TokenEdit(2, 17, tuple(tokens[17:]))
    cut = (TableEdit(2, 0, EditKind.TRUNCATE, 1), append(2, 1, 5, 6))
    steps.run(1, 2, token_edits=(edit,), table_edits=cut, chunks=(Chunk(2, 2),))
    processed.clear()
    steps.run(1, 9, chunks=(Chunk(2, 9),))
    steps.runner.reset()
    afresh = admission(2, tokens, (3, 5, 6), PENALIZED, 10)
    steps.run(1, 9, admit=(afresh,), chunks=(Chunk(2, 9),))
    assert torch.equal(processed[0], processed[1])


def test_a_partly_equal_block_is_copied_and_computed_from_the_first_other_token(
    steps: Steps,
) -> None:
    cached = [*PROMPT, 150, 160, 170, 180, 190, 200, 210]
    prompt = [*cached[:13], 1111, 1222, 1333, 1444, 1555]
    expected = steps.alone(prompt, GREEDY, 5)
    steps.runner.reset()
    steps.prefill(1, cached, (3, 5, 7), GREEDY)
    before = steps.storage[[3, 5, 7]].clone()
    admit = (admission(0, prompt, (3, 9, 11), GREEDY, 13),)
    chunks = (Chunk(0, 5), Chunk(1, 0))
    result = steps.run(2, 5, admit=admit, copies=(BlockCopy(5, 9),), chunks=chunks)
    assert torch.equal(steps.storage[[3, 5, 7]], before)
    second = steps.run(1, 1, release=(1,))
    found = [by_row(result)[0], by_row(second)[0], *steps.decode(1, 3)[0]]
    assert found == expected


@pytest.mark.parametrize("num_kept", [5, 8, 13, 16, 17])
def test_a_preempted_sequence_comes_back_with_the_prefix_that_it_kept(
    steps: Steps, num_kept: int
) -> None:
    first = steps.prefill(2, PROMPT, (3, 5, 6), SAMPLED)
    tokens = [*PROMPT, first, *steps.decode(1, 7)[2]]
    expected = steps.decode(1, 5)[2]
    kept = (3, 5, 6)[: -(-num_kept // 8)]
    other = RowAdmission(0, [7, 8, 9], 3, 0, ((9,),), GREEDY)
    steps.run(1, 3, release=(2,), admit=(other,), chunks=(Chunk(0, 3),))
    blocks = (*kept, 12, 13, 14)[:3]
    gap = len(tokens) - num_kept
    chunks = (Chunk(4, gap),) if gap > 1 else ()
    admit = (admission(4, tokens, blocks, SAMPLED, num_kept),)
    result = steps.run(1, gap, release=(0,), admit=admit, chunks=chunks)
    assert [by_row(result)[4], *steps.decode(1, 4)[4]] == expected
