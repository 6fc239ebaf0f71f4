"""A model that drafts changes no token and no log-probability (to the bit, on the CPU)."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from tests.engine.checkpoints import save_checkpoint
from tests.engine.crowding import preempt_much
from tests.engine.drafters import save_drafter, save_reordered_drafter
from tests.engine.drafting import check_counts
from tests.engine.test_law import make_crowd, make_llm
from tests.engine.test_speculation_law import everything, seen, without_drafts

from quire import LLM, SamplingParams
from quire.core.scheduling.pacing import ConstantPacer
from quire.core.step import Drafts, StepPlan
from quire.runtime.draft_model import DraftModel

pytestmark = pytest.mark.usefixtures("native_engine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_drafter(tmp_path_factory.mktemp("drafter") / "model")


def make_drafting(folder: Path, **options: Any) -> LLM:
    """An engine in which the model at `folder` drafts, whatever that costs."""
    own = {"speculative_model": str(folder), "speculation": "draft_model", "num_draft_tokens": 3}
    llm = make_llm(**{**own, **options})
    llm.engine.scheduler.pacer = ConstantPacer()
    return llm


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"speculation": "auto", "max_num_batched_tokens": 40, "max_num_seqs": 32},
        {"num_blocks": 36, "block_size": 8, "async_scheduling": True},
        {"kv_cache_dtype": "int8", "enable_prefix_caching": False},
    ],
    ids=lambda options: ",".join(options) or "default",
)
def test_a_model_that_drafts_changes_nothing_of_an_answer(
    folder: Path, options: dict[str, Any]
) -> None:
    numbers = {name: value for name, value in options.items() if name == "kv_cache_dtype"}
    prompts, params = everything()
    llm = make_drafting(folder, **options)
    if "num_blocks" in options:  # so that much is preempted
        preempt_much(llm)
    expected = seen(without_drafts(**numbers))
    assert seen(llm.generate(prompts, params, use_tqdm=False)) == expected
    check_counts(llm.engine)
    assert ("num_blocks" in options) == (llm.engine.stats().num_preemptions > 0)


def test_a_model_with_other_token_ids_drafts(folder: Path, tmp_path: Path) -> None:
    """And nearly as well as one with the same ids, sampled drafts, too."""
    prompts: list[Any] = ["def f(x):\n    return", "class A:\n", "import os\n", "for i in range("]
    params = [
        SamplingParams(temperature=at % 2, seed=at, max_tokens=60, ignore_eos=True, logprobs=1)
        for at in range(4)
    ]
    expected = seen(make_llm().generate(prompts, params, use_tqdm=False))
    shares: list[float] = []
    for each in (folder, save_reordered_drafter(tmp_path / "reordered")):
        llm = make_drafting(each)
        assert seen(llm.generate(prompts, params, use_tqdm=False)) == expected
        stats = llm.engine.stats()
        shares.append(stats.num_accepted_drafts / stats.num_drafts)
    assert shares[1] > 0.8 * shares[0] > 0.2


def few() -> tuple[list[Any], list[SamplingParams]]:
    prompts, params = make_crowd()
    return prompts[:5], params[:5]


@pytest.mark.usefixtures("forked_ranks")
def test_only_the_first_rank_drafts(folder: Path) -> None:
    prompts = ["def f(x):\n", "class A:\n"]
    params = [SamplingParams(temperature=t, seed=1, max_tokens=12, logprobs=1) for t in (0.0, 1.0)]
    expected = make_llm(tensor_parallel_size=2).generate(prompts, params, use_tqdm=False)
    llm = make_drafting(folder, tensor_parallel_size=2)
    assert seen(llm.generate(prompts, params, use_tqdm=False)) == seen(expected)
    check_counts(llm.engine)


@pytest.mark.parametrize(("target", "drafter"), [("llama", "mistral"), ("mistral", "llama")])
def test_a_model_of_another_family_with_windows(target: str, drafter: str, tmp_path: Path) -> None:
    """It never agrees. Blocks that windows have passed are kept for it, in a KV group of its own
    if all of the target's layers have windows."""
    whole = save_checkpoint(target, tmp_path / "whole")
    small = save_checkpoint(drafter, tmp_path / "small")
    options: dict[str, Any] = {"model": str(whole), "skip_tokenizer_init": True, "block_size": 8}
    prompts = [{"prompt_token_ids": [3 + index % 40 for index in range(60)]}] * 2
    params = [
        SamplingParams(temperature=temperature, seed=1, max_tokens=60, ignore_eos=True, logprobs=1)
        for temperature in (0.0, 1.0)
    ]
    expected = make_llm(**options).generate(prompts, params, use_tqdm=False)
    llm = make_drafting(small, **options)
    for _ in range(2):
        assert seen(llm.generate(prompts, params, use_tqdm=False)) == seen(expected)
    assert llm.engine.stats().num_drafts > 300


def test_drafts_are_the_tokens_of_the_model_alone(folder: Path) -> None:
    """With the same noise: sampled drafts, too, after right and wrong drafts, prefix hits and
    forks."""
    llm = make_drafting(folder)
    alone = make_llm(model=str(folder))
    runner, found = llm.engine._runner, []
    draft = runner.draft

    def record(plan: StepPlan) -> Drafts:
        drafts = draft(plan)
        by_row = {sequence.row: sequence for sequence in llm.engine.scheduler.running}
        for row, drafted in drafts.of_rows.items():
            sequence = by_row[row]
            assert drafted.num_reached_tokens == len(sequence.token_ids)
            found.append((list(sequence.token_ids), sequence, drafted.token_ids))
        return drafts

    runner.draft = record  # type: ignore[method-assign]
    params = [
        SamplingParams(temperature=temperature, seed=index, n=n, max_tokens=12, ignore_eos=True)
        for index, (temperature, n) in enumerate([(0.0, 1), (0.7, 2), (1.0, 1)])
    ]
    prompts = ["def f(x):\n    return", "class A:\n", "import os\n" * 20]
    for _ in range(2):
        llm.generate(prompts, params, use_tqdm=False)
    check_counts(llm.engine)
    for token_ids, sequence, drafts in found[::5]:
        wish = SamplingParams(
            temperature=sequence.params.temperature,
            seed=sequence.params.seed,
            n=sequence.branch_index + 1,
            max_tokens=len(drafts),
            ignore_eos=True,
        )
        answer = alone.generate({"prompt_token_ids": token_ids}, wish, use_tqdm=False)[0]
        assert tuple(answer.outputs[sequence.branch_index].token_ids) == drafts


def test_cached_prefixes_have_the_drafters_keys_and_values(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_drafting(folder, block_size=16)
    counts: list[int] = []
    run = DraftModel._run

    def count(drafter: DraftModel, step: Any) -> Any:
        counts.append(len(step.token_ids))
        return run(drafter, step)

    monkeypatch.setattr(DraftModel, "_run", count)
    prompt = {"prompt_token_ids": [7 + index % 50 for index in range(100)]}
    wish = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    first = llm.generate(prompt, wish, use_tqdm=False)
    assert max(counts) == 100  # of 101 tokens, the last one in a run of its own
    counts.clear()
    assert seen(llm.generate(prompt, wish, use_tqdm=False)) == seen(first)
    assert 0 < max(counts) <= 100 - 96 + 8


def test_drafts_that_fail(folder: Path) -> None:
    prompts, params = few()
    llm = make_drafting(folder)
    runner, calls = llm.engine._runner, itertools.count()
    draft = runner.draft

    def draft_or_fail(plan: StepPlan) -> Drafts:
        if next(calls) % 5 == 2:
            raise RuntimeError("the device failed")
        return draft(plan)

    runner.draft = draft_or_fail  # type: ignore[method-assign]
    expected = make_llm().generate(prompts, params, use_tqdm=False)
    assert seen(llm.generate(prompts, params, use_tqdm=False)) == seen(expected)
    assert llm.engine.stats().num_failed_steps >= 2
    check_counts(llm.engine)


def test_blocks_that_a_tier_loads(folder: Path, tmp_path: Path) -> None:
    """The second engine reads what the first one stored, and drafts from it."""
    prompts, params = few()
    expected = make_llm().generate(prompts, params, use_tqdm=False)
    for _ in range(2):
        tier = {"cache_dir": str(tmp_path / "cache"), "cache_size": "64MiB", "num_blocks": 60}
        llm = make_drafting(folder, **tier, block_size=8)
        assert seen(llm.generate(prompts, params, use_tqdm=False)) == seen(expected)
        llm.engine.tier_work.drain()  # blocks are held while they are stored
        check_counts(llm.engine)
        llm.engine.tier_work.close()
