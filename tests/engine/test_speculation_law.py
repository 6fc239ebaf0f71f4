"""Drafts change no token and no log-probability, whatever else happens (to the bit, on the CPU).

Most tests use a proposer that knows the answers and errs at random positions: so each number of
accepted drafts occurs, with sampled and with greedy rows.
"""

import functools
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.adapters.embedded import save_adapter
from tests.engine import test_hybrid_law as hybrids
from tests.engine import test_law
from tests.engine.crowding import preempt_much
from tests.engine.drafting import check_counts, recorded, use_proposer
from tests.engine.test_grammar_law import PROMPTS, WISHES
from tests.engine.test_law import make_crowd
from tests.engine.tier_law import eager
from tests.models.family_shapes import save_wide
from tests.runtime.hybrid_family import registered, save_hybrid

from quire import LLM, BeamSearchParams, LoRARequest, SamplingParams, StructuredOutputsParams
from quire.assembly import build
from quire.core.scheduling.pacing import ConstantPacer
from quire.engine_client.results import RequestOutput

NGRAMS: dict[str, Any] = {"speculation": "ngram", "ngram_min_match": 1}


def make_llm(**options: Any) -> LLM:
    """An engine without drafts, unless the options ask for them."""
    return test_law.make_llm(**({"speculation": "off"} | options))


def seen(outputs: list[RequestOutput]) -> list[tuple[Any, list[Any]]]:
    """All that a client sees: of each prompt, and of each branch."""
    return [
        (
            output.prompt_logprobs,
            [
                (
                    each.token_ids,
                    each.text,
                    each.finish_reason,
                    each.stop_reason,
                    each.logprobs,
                    each.cumulative_logprob,
                )
                for each in output.outputs
            ],
        )
        for output in outputs
    ]


def everything() -> tuple[list[Any], list[SamplingParams]]:
    """Requests with every option whose state depends on tokens, grammars, beams and forks."""
    prompts, params = make_crowd()
    more = [
        SamplingParams(temperature=1.0, seed=70, max_tokens=20, bad_words=["self", "return"]),
        SamplingParams(temperature=0.0, seed=71, max_tokens=20, min_tokens=9, prompt_logprobs=1),
        SamplingParams(temperature=1.0, seed=72, max_tokens=20, allowed_token_ids=[7, 8, 9, 10]),
    ]
    return [*prompts, *PROMPTS, *PROMPTS[:3]], [*params, *WISHES, *more]


@functools.cache
def without_drafts(**numbers: Any) -> list[RequestOutput]:
    """The answers to `everything`, of an engine with these options and without drafts."""
    return make_llm(**numbers).generate(*everything(), use_tqdm=False)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 40, "max_num_seqs": 32, "num_draft_tokens": 3},
        {"num_blocks": 36, "block_size": 8},
        {"num_blocks": 20, "async_scheduling": True},
        {"max_num_seqs": 3, "enable_prefix_caching": False, "num_draft_tokens": 15},
        {"kv_cache_dtype": "int8"},
        {"quantization": "int8", "block_size": 8},
        {"tensor_parallel_size": 2},
        {"max_itl_ratio": 2.0, "scheduling_policy": "fair"},
    ],
    ids=lambda options: ",".join(options) or "default",
)
@pytest.mark.usefixtures("native_engine", "forked_ranks")
def test_drafts_change_nothing_of_an_answer(options: dict[str, Any]) -> None:
    numbers = {
        name: value
        for name, value in options.items()
        if name in ("quantization", "kv_cache_dtype", "tensor_parallel_size")
    }
    prompts, params = everything()
    plain = without_drafts(**numbers)
    llm = make_llm(**{**options, **NGRAMS})
    if "num_blocks" in options:  # so that much is preempted
        preempt_much(llm)
    rests = "async_scheduling" in options or "scheduling_policy" in options
    for _ in range(2):  # the second time with a warm prefix cache
        assert seen(llm.generate(prompts, params, use_tqdm=False)) == seen(plain)
        use_proposer(llm.engine, recorded(plain, params), rests=rests)
    check_counts(llm.engine)
    assert ("num_blocks" in options) == (llm.engine.stats().num_preemptions > 0)


@pytest.mark.usefixtures("native_engine")
def test_branches_of_running_requests_and_beams() -> None:
    """A branch that is forked after as many tokens continues with the same ones."""
    wish = SamplingParams(temperature=1.0, seed=4, max_tokens=40, ignore_eos=True, logprobs=1)
    beams = BeamSearchParams(beam_width=3, max_tokens=8)
    prompt = "def f(x):\n"
    plain = make_llm()
    answers = recorded(plain.generate([prompt], [wish], use_tqdm=False), [wish])
    drafting = make_llm(**NGRAMS)
    use_proposer(drafting.engine, answers)
    told: list[Any] = []
    num_tokens = 10
    for llm in (drafting, plain):
        with llm.start(prompt, wish) as trunk:
            while len(trunk.output.token_ids) < num_tokens:
                trunk.step()
            num_tokens = len(trunk.output.token_ids)
            branch = trunk.fork()
            ends = trunk.finish(), branch.finish()
            told.append([(each.token_ids, each.logprobs) for each in ends])
        found = llm.beam_search([prompt], beams, use_tqdm=False)
        told.append([(beam.tokens, beam.cum_logprob) for beam in found[0].sequences])
    assert told[:2] == told[2:]
    assert told[0][0] != told[0][1]
    check_counts(drafting.engine)


@pytest.mark.usefixtures("native_engine")
def test_adapters_and_tiers(tmp_path: Path) -> None:
    adapters = [
        LoRARequest(f"a{seed}", seed, str(save_adapter(tmp_path / f"a{seed}", seed)))
        for seed in (1, 2)
    ]
    prompts, params = make_crowd()
    lora = [adapters[index % 2] if index % 3 else None for index in range(len(prompts))]
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    plain = make_llm(**options).generate(prompts, params, use_tqdm=False, lora_request=lora)
    for _ in range(2):  # the second engine reads what the first one stored
        tier = {"cache_dir": str(tmp_path / "cache"), "cache_size": "64MiB", "num_blocks": 40}
        llm = make_llm(**options, **NGRAMS, **tier, block_size=8)
        use_proposer(llm.engine, recorded(plain, params))
        found = llm.generate(prompts, params, use_tqdm=False, lora_request=lora)
        assert seen(found) == seen(plain)
        llm.engine.tier_work.drain()  # blocks are held while they are stored
        check_counts(llm.engine)
        llm.engine.tier_work.close()


@pytest.fixture(params=["windows", "latents", "all kinds", "nothing but states"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with registered():
        yield save_hybrid(tmp_path, layer_types=hybrids.KINDS[request.param])


@pytest.mark.usefixtures("native_engine")
def test_windows_latents_and_states(folder: Path) -> None:
    def make(**options: Any) -> LLM:
        sizes = {"max_model_len": 192, "block_size": 8}
        return LLM(str(folder), skip_tokenizer_init=True, dtype="float32", **(sizes | options))

    rng = random.Random(3)
    prompts: list[Any] = [
        {"prompt_token_ids": [rng.randrange(499) for _ in range(rng.randrange(1, 90))]}
        for _ in range(8)
    ]
    params = [
        SamplingParams(
            n=1 + index % 2,
            temperature=(0.0, 1.0)[index % 2],
            seed=index,
            max_tokens=50,
            ignore_eos=True,
            logprobs=0,
        )
        for index in range(8)
    ]
    plain = make(enable_prefix_caching=False).generate(prompts, params, use_tqdm=False)
    whole = make(num_blocks=4096)
    tight = whole.engine.scheduler.memory.growth.most_to_hold(192) * 2
    for options in ({}, {"num_blocks": tight, "max_num_batched_tokens": 24, "max_num_seqs": 20}):
        llm = make(**options, **NGRAMS)
        use_proposer(llm.engine, recorded(plain, params))
        for _ in range(2):
            assert seen(llm.generate(prompts, params, use_tqdm=False)) == seen(plain)
        check_counts(llm.engine)


@pytest.mark.parametrize("family", ["falcon_h1", "lfm2", "nemotron_h", "qwen3_next"])
@pytest.mark.usefixtures("native_engine")
def test_families_with_states(family: str, tmp_path: Path) -> None:
    """Mamba-2 and the gated delta rule, beside attention. Follow-ups find the same
    prefixes as without drafts."""
    save_wide(family, tmp_path)
    rng = random.Random(4)
    prompts: list[Any] = [
        {"prompt_token_ids": [rng.randrange(2, 1013) for _ in range(rng.randrange(1, 60))]}
        for _ in range(4)
    ]
    params = [
        SamplingParams(temperature=at % 2, seed=at, max_tokens=40, ignore_eos=True, logprobs=1)
        for at in range(4)
    ]

    def make(**options: Any) -> LLM:
        sizes = {"max_model_len": 192, "block_size": 8, "max_num_seqs": 8}
        return LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32", **(sizes | options))

    plain, drafting = make(), make(**NGRAMS)
    num_hit_tokens = []
    for llm in (plain, drafting):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        if llm is plain:
            expected = outputs
            use_proposer(drafting.engine, recorded(outputs, params))
        assert seen(outputs) == seen(expected)
        longer: list[Any] = [
            {"prompt_token_ids": [*output.prompt_token_ids, *output.outputs[0].token_ids, 5]}
            for output in outputs
        ]
        again = llm.generate(longer, params, use_tqdm=False)
        num_hit_tokens.append((seen(again), llm.engine.stats().num_hit_tokens))
    assert num_hit_tokens[0] == num_hit_tokens[1] and num_hit_tokens[0][1] > 150
    check_counts(drafting.engine)
    assert drafting.engine.stats().num_steps < 0.8 * plain.engine.stats().num_steps


@pytest.mark.usefixtures("native_engine")
def test_blocks_of_accepted_drafts_are_stored_evicted_and_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "check_host_tier", lambda options: None)
    prompts, params = hybrids.make_crowd()
    plain = hybrids.make_llm(folder, enable_prefix_caching=False)
    expected = plain.generate(prompts, params, use_tqdm=False)
    num_blocks = plain.engine.scheduler.memory.growth.most_to_hold(192) * 3 // 2
    tier = {"num_blocks": num_blocks, "host_cache_size": "8MiB", "max_num_seqs": 20}
    with eager():
        llm = hybrids.make_llm(folder, **tier, **NGRAMS)
        use_proposer(llm.engine, recorded(expected, params))
        for _ in range(2):
            assert seen(llm.generate(prompts, params, use_tqdm=False)) == seen(expected)
        moves = llm.engine.scheduler.memory.moves
        assert moves is not None and moves.loads.stats.num_loaded_tokens > 0
        llm.engine.tier_work.drain()
        check_counts(llm.engine)
        llm.engine.tier_work.close()


@pytest.mark.usefixtures("native_engine")
def test_steps_that_fail_while_drafts_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, params = make_crowd()
    plain = make_llm().generate(prompts, params, use_tqdm=False)
    llm = make_llm(**NGRAMS)
    use_proposer(llm.engine, recorded(plain, params))
    runner, calls = llm.engine._runner, itertools.count()
    verify = runner._verify  # type: ignore[attr-defined]

    def verify_or_fail(*given: Any) -> Any:
        if next(calls) % 5 == 2:
            raise RuntimeError("the device failed")
        return verify(*given)

    monkeypatch.setattr(runner, "_verify", verify_or_fail)
    assert seen(llm.generate(prompts, params, use_tqdm=False)) == seen(plain)
    assert llm.engine.stats().num_failed_steps >= 2
    check_counts(llm.engine)


@pytest.mark.usefixtures("native_engine")
def test_grammars_whose_masks_are_slow_now_and_then() -> None:
    """A slow mask lets the next one begin early, alone and without masks behind drafts."""
    plain = make_llm().generate(PROMPTS, WISHES, use_tqdm=False)
    llm = make_llm(**NGRAMS)
    use_proposer(llm.engine, recorded(plain, WISHES))
    rng, now = random.Random(3), itertools.count()
    llm.engine.grammars._clock = lambda: next(now) * (rng.random() < 0.3)
    assert seen(llm.generate(PROMPTS, WISHES, use_tqdm=False)) == seen(plain)
    check_counts(llm.engine)


@pytest.mark.usefixtures("native_engine")
def test_forced_tokens_behind_a_limited_number_of_any_tokens() -> None:
    """A budget for reasoning is such a grammar: any tokens, then one that it names by its id."""
    form = StructuredOutputsParams(grammar='start: <[3-49,51-4095]>{0,6} <[50]> "so it is"')
    wish = SamplingParams(temperature=1.0, seed=3, max_tokens=30, structured_outputs=form)
    plain = make_llm().generate(PROMPTS, wish, use_tqdm=False)
    llm = make_llm(speculation="forced")
    llm.engine.scheduler.pacer = ConstantPacer()
    assert seen(llm.generate(PROMPTS, wish, use_tqdm=False)) == seen(plain)
    assert llm.engine.stats().num_accepted_drafts > 0
    # With drafts of the reasoning, too, the end of the reasoning lies within a step's drafts.
    use_proposer(llm.engine, recorded(plain, [wish] * len(PROMPTS)))
    assert seen(llm.generate(PROMPTS, wish, use_tqdm=False)) == seen(plain)


@pytest.mark.usefixtures("native_engine")
def test_a_conversation_finds_as_much_of_its_prefix_as_without_drafts() -> None:
    wish = SamplingParams(temperature=1.0, seed=2, max_tokens=30, ignore_eos=True)
    counts, expected = [], None
    for speculation in ("off", "ngram"):
        llm = make_llm(speculation=speculation, block_size=8)
        prompt, answers = list(range(40, 77)), []
        for turn in range(3):
            if expected is not None:
                use_proposer(llm.engine, {(tuple(prompt), 2, 0): expected[turn]})
            (output,) = llm.generate({"prompt_token_ids": prompt}, wish, use_tqdm=False)
            answers.append(list(output.outputs[0].token_ids))
            prompt = [*prompt, *answers[-1], 50 + turn]
        assert expected in (None, answers)
        expected = answers
        counts.append(llm.engine.stats().num_hit_tokens)
    check_counts(llm.engine)
    assert counts[0] == counts[1] > 2 * 37


@pytest.mark.usefixtures("native_engine")
def test_answers_that_stay_out_of_the_history_give_no_drafts() -> None:
    wish = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    llm = make_llm(speculation="history", enable_prefix_caching=False)
    llm.engine.scheduler.pacer = ConstantPacer()
    assert llm.engine.facts["answer_bytes"] > 0
    found = []
    for shares in (False, True, False, True):
        prompt = {"prompt": "class A:", "speculation_history": shares}
        before = llm.engine.stats().num_accepted_drafts
        (output,) = llm.generate(prompt, wish, use_tqdm=False)
        num_accepted = llm.engine.stats().num_accepted_drafts - before
        found.append((num_accepted > 0, output.outputs[0].token_ids))
    assert [has_drafts for has_drafts, _ in found] == [False, False, False, True]
    assert all(token_ids == found[0][1] for _, token_ids in found)
