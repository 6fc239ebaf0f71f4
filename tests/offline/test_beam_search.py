"""`LLM.beam_search` finds what transformers' beam search finds, whatever the memory does."""

import functools
import json
import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.checkpoints import CONFIGS, save_checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire.core.request import Request
from quire.core.sampling_params import BeamSearchParams, DecodingParams, SamplingParams
from quire.core.scheduling.growth_forecast import GrowthForecast
from quire.errors import InvalidRequestError, RequestNeverFitsError
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.offline.beams import BeamSearchOutput
from quire.offline.llm import LLM

Prompt = dict[str, list[int]]
Family = tuple[Path, PreTrainedModel]

END_TOKEN_IDS = tuple(range(1, 31))
"""Of the random models: so many that some of their beams end, as those of real ones do."""

NEAR_TIE = 1e-4
"""Scores so close may stand in another order: both sides sum in fp32, over other roundings."""


@pytest.fixture(scope="module", params=[*CONFIGS, "embedded"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.set_num_threads(1)
    if request.param == "embedded":
        folder = EMBEDDED_MODEL
    else:
        folder = save_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
        ends = {"eos_token_id": list(END_TOKEN_IDS)}
        (folder / "generation_config.json").write_text(json.dumps(ends))
    return folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def make_llm(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), skip_tokenizer_init=True, dtype="float32", **options)


def make_prompts(lengths: tuple[int, ...]) -> list[Prompt]:
    rng = random.Random(sum(lengths))
    return [{"prompt_token_ids": [rng.randrange(31, 1000) for _ in range(n)]} for n in lengths]


@torch.inference_mode()
def log_probability(model: PreTrainedModel, tokens: list[int], num_prompt_tokens: int) -> float:
    """What the reference says of the tokens after the prompt."""
    logprobs = model(torch.tensor([tokens])).logits[0, :-1].float().log_softmax(1)
    own = logprobs.gather(1, torch.tensor(tokens[1:]).unsqueeze(1))[:, 0]
    return float(own[num_prompt_tokens - 1 :].sum())


@functools.cache
def transformers_search(
    model: PreTrainedModel, prompt_ids: tuple[int, ...], options: tuple[tuple[str, Any], ...]
) -> tuple[list[list[int]], list[float]]:
    """Tokens, prompt and padding included, and scores; end tokens from the model's folder.

    options: of the params, by name.
    """
    params = BeamSearchParams(**dict(options))
    found = model.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        do_sample=False,
        early_stopping=False,
        length_penalty=params.length_penalty,
        max_new_tokens=params.max_tokens,
        eos_token_id=None if params.ignore_eos else end_token_ids_of(model),
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    return found.sequences.tolist(), found.sequences_scores.tolist()


def end_token_ids_of(model: PreTrainedModel) -> list[int]:
    ids = model.generation_config.eos_token_id
    return [ids] if isinstance(ids, int) else list(ids)


def assert_equals_transformers(
    model: PreTrainedModel, prompt: Prompt, params: BeamSearchParams, output: BeamSearchOutput
) -> int:
    """Returns how many of the results ended with an end token."""
    prompt_ids = prompt["prompt_token_ids"]
    lines, scores = transformers_search(model, tuple(prompt_ids), tuple(asdict(params).items()))
    assert output.error is None
    assert len(output.sequences) == params.beam_width
    num_ended = 0
    for ours, line, score in zip(output.sequences, lines, scores, strict=True):
        assert ours.score is not None and ours.cum_logprob is not None
        assert ours.score == pytest.approx(score, abs=NEAR_TIE)
        if ours.tokens != line[: len(ours.tokens)]:
            assert log_probability(model, ours.tokens, len(prompt_ids)) == pytest.approx(
                ours.cum_logprob, abs=1e-3
            )
            print(f"near-tie: {ours.score} and {score}")
        num_generated = len(ours.tokens) - len(prompt_ids)
        assert ours.score == pytest.approx(ours.cum_logprob / num_generated**params.length_penalty)
        ended = ours.tokens[-1] in end_token_ids_of(model) and not params.ignore_eos
        assert ours.finish_reason == ("stop" if ended else "length")
        assert ended or num_generated == params.max_tokens
        num_ended += ended
    return num_ended


SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunked": {"max_num_batched_tokens": 12, "max_num_seqs": 8, "block_size": 8},
    "no cache": {"enable_prefix_caching": False, "block_size": 256},
}
SEARCHES = [
    BeamSearchParams(beam_width=2, max_tokens=25),
    BeamSearchParams(beam_width=4, max_tokens=12, length_penalty=-0.5),
    BeamSearchParams(beam_width=6, max_tokens=18, length_penalty=2.0, ignore_eos=True),
    BeamSearchParams(beam_width=3, max_tokens=33, length_penalty=0.0),
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_equals_transformers(family: Family, setting: str) -> None:
    folder, model = family
    llm = make_llm(folder, **SETTINGS[setting])
    num_ended = 0
    for params, prompt in zip(SEARCHES, make_prompts((1, 15, 16, 45)), strict=True):
        (output,) = llm.beam_search([prompt], params, use_tqdm=False)
        num_ended += assert_equals_transformers(model, prompt, params, output)
    assert num_ended > 0 or folder == EMBEDDED_MODEL
    assert llm.engine.stats().num_held_blocks == 0


def assert_same(
    found: list[BeamSearchOutput], expected: list[BeamSearchOutput], prompts: list[Prompt]
) -> None:
    """The same tokens. Scores may differ in their last bits, as long as torch's linears round
    differently for another number of rows."""
    for ours, theirs, prompt in zip(found, expected, prompts, strict=True):
        what = f"prompt of {len(prompt['prompt_token_ids'])}"
        assert [beam.tokens for beam in ours.sequences] == [
            beam.tokens for beam in theirs.sequences
        ], what
        reasons = [beam.finish_reason for beam in theirs.sequences]
        assert [beam.finish_reason for beam in ours.sequences] == reasons, what
        scores = [beam.score for beam in theirs.sequences]
        assert [beam.score for beam in ours.sequences] == pytest.approx(scores, abs=NEAR_TIE), what


@pytest.mark.parametrize("block_size", [8, 16])
def test_searches_that_preempt_each_other_find_the_same(
    family: Family, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = family
    params = BeamSearchParams(beam_width=4, max_tokens=24)
    prompts = make_prompts((33, 5, 16, 40))
    options: dict[str, Any] = {"max_model_len": 80, "block_size": block_size}
    alone = make_llm(folder, **options)
    expected = [alone.beam_search([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    # Enough for one search at its longest, each beam in blocks of its own; four don't fit.
    num_blocks = 4 * alone.engine.scheduler.memory.growth.most_to_hold(64)
    crowded = make_llm(folder, num_blocks=num_blocks, max_num_seqs=18, **options)
    has_windows = bool(crowded.engine.scheduler.memory.growth.windows)
    if has_windows:  # what they hold is bounded and known, so none has to go
        monkeypatch.setattr(GrowthForecast, "fits_later", lambda *_: True)
    assert_same(crowded.beam_search(prompts, params, use_tqdm=False), expected, prompts)
    assert crowded.engine.stats().num_held_blocks == 0
    # In small blocks, windows hold so little that four searches fit after all.
    assert (crowded.engine.stats().num_preemptions > 0) != (has_windows and block_size == 8)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    torch.set_num_threads(1)
    llm = LLM(dtype="float32", max_model_len=256, num_blocks=256, max_num_seqs=8)
    yield llm
    assert llm.engine.stats().num_held_blocks == 0


SEARCH = BeamSearchParams(beam_width=3, max_tokens=10)


def test_results_have_the_prompt_and_all_text(llm: LLM) -> None:
    first, second = llm.beam_search(["import os", "def f(x):"], SEARCH, use_tqdm=False)
    assert all(beam.text.startswith("import os") for beam in first.sequences)
    assert all(beam.text.startswith("def f(x):") for beam in second.sequences)
    tokenizer = llm.get_tokenizer()
    for beam in first.sequences:
        assert beam.tokens[: len(tokenizer.encode("import os"))] == tokenizer.encode("import os")
        assert beam.text == tokenizer.decode(beam.tokens)
    assert len({tuple(beam.tokens) for beam in first.sequences}) == 3
    scores = [beam.score for beam in first.sequences if beam.score is not None]
    assert scores == sorted(scores, reverse=True) and len(scores) == 3


def test_one_beam_is_greedy(llm: LLM) -> None:
    (search,) = llm.beam_search("import os", BeamSearchParams(beam_width=1), use_tqdm=False)
    (greedy,) = llm.generate("import os", SamplingParams(temperature=0.0), use_tqdm=False)
    expected = [*greedy.prompt_token_ids, *greedy.outputs[0].token_ids]
    assert [beam.tokens for beam in search.sequences] == [expected]


def test_a_temperature_flattens_the_log_probabilities(llm: LLM) -> None:
    def best(temperature: float) -> float:
        params = BeamSearchParams(beam_width=2, max_tokens=8, temperature=temperature)
        score = llm.beam_search("import os", params, use_tqdm=False)[0].sequences[0].score
        assert score is not None
        return score

    assert best(0.0) == best(1.0)
    assert best(4.0) < best(1.0) < best(0.25) < 0.0


def test_a_search_and_a_stream_do_not_disturb_each_other(llm: LLM) -> None:
    wish = SamplingParams(max_tokens=40, temperature=0.9, seed=3, ignore_eos=True)
    alone_text = "".join(llm.stream("class Stack:", wish))
    alone = llm.beam_search("import os", SEARCH, use_tqdm=False)
    stream = llm.stream("class Stack:", wish)
    text = next(stream)
    beside = llm.beam_search("import os", SEARCH, use_tqdm=False)
    assert text + "".join(stream) == alone_text
    prompts = [{"prompt_token_ids": llm.get_tokenizer().encode("import os")}]
    assert_same(beside, alone, prompts)


def test_a_search_given_up_in_the_middle_leaves_no_block(llm: LLM) -> None:
    held_before = llm.engine.stats().num_held_blocks
    params = DecodingParams(max_tokens=50, beam_width=4)
    llm.engine.add(Request("given up", [5, 6, 7], params, n=4))
    for _ in range(7):
        assert llm.engine.step() == []
    assert llm.engine.stats().num_held_blocks > held_before
    llm.engine.abort("given up")
    assert llm.engine.stats().num_held_blocks == held_before
    assert not llm.engine.has_work()


def test_invalid_beam_searches_are_refused_by_name(llm: LLM) -> None:
    wrong: Any = SamplingParams()
    with pytest.raises(InvalidRequestError, match="must be a BeamSearchParams"):
        llm.beam_search("import os", wrong)
    with pytest.raises(RequestNeverFitsError, match=r"beam_width is 9.*max_num_seqs=8"):
        llm.beam_search("import os", BeamSearchParams(beam_width=9))
    assert not llm.engine.has_work()


def test_beams_that_may_outgrow_the_pool_are_refused() -> None:
    small = LLM(dtype="float32", max_model_len=256, num_blocks=40)
    with pytest.raises(RequestNeverFitsError, match="in each of 4 beams"):
        small.beam_search("import os", BeamSearchParams(beam_width=4, max_tokens=None))
    assert len(small.beam_search("import os", SEARCH, use_tqdm=False)[0].sequences) == 3


def test_a_vocabulary_too_small_for_the_width_says_so(tmp_path: Path) -> None:
    """Five tokens, one step: five continuations for six beams."""
    folder = save_checkpoint("llama", tmp_path, vocab_size=5)
    params = BeamSearchParams(beam_width=6, max_tokens=1)
    llm = make_llm(folder)
    (output,) = llm.beam_search([{"prompt_token_ids": [2, 3]}], params, use_tqdm=False)
    *found, missing = output.sequences
    assert sorted(beam.tokens[-1] for beam in found) == list(range(5))
    assert (missing.finish_reason, missing.cum_logprob, missing.score) == ("error", None, None)
    assert output.error == "there are only 5 different continuations"
