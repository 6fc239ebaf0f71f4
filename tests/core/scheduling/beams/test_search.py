"""Beam search against transformers' own, on the same logits; and its corners by hand."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quire.core.request import FinishReason
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.beams.search import BeamSearch, BeamStep, Hypothesis

Logits = Callable[[list[list[int]]], torch.Tensor]

PROMPT = [3, 1, 4, 1, 5]
VOCAB_SIZE = 31


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def search(
    logits_of: Logits,
    width: int,
    length_penalty: float,
    max_tokens: int,
    end_token_ids: Sequence[int] = (),
) -> tuple[list[Hypothesis], int]:
    """Run a search, each step's logits computed anew from whole chains; result, and its steps."""
    params = DecodingParams(max_tokens, end_token_ids=tuple(end_token_ids), beam_width=width)
    beams = BeamSearch(
        width,
        length_penalty,
        num_prompt_tokens=len(PROMPT),
        max_num_tokens=len(PROMPT) + max_tokens,
        end_token_ids=end_token_ids,
    )
    chains, num_steps = [PROMPT], 0
    while beams.num_live:
        best = logits_of(chains).log_softmax(dim=1).sort(dim=1, descending=True, stable=True)
        candidates = [
            list(zip(ids[: params.num_beam_candidates], logprobs, strict=False))
            for ids, logprobs in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        steps = beams.advance(candidates)
        chains = [[*chains[step.parent], step.token_id] for step in steps]
        num_steps += 1
    return beams.hypotheses(), num_steps


def transformers_search(
    model: Any, width: int, length_penalty: float, max_tokens: int, end_token_ids: Sequence[int]
) -> tuple[list[list[int]], list[float]]:
    """The same by transformers: generated tokens, cut after the first end token, and scores."""
    result = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        early_stopping=False,
        length_penalty=length_penalty,
        max_new_tokens=max_tokens,
        eos_token_id=list(end_token_ids) or None,
        pad_token_id=end_token_ids[0] if end_token_ids else None,
        output_scores=True,
        return_dict_in_generate=True,
    )
    sequences = []
    for line in result.sequences[:, len(PROMPT) :].tolist():
        ends = [index for index, token_id in enumerate(line) if token_id in end_token_ids]
        sequences.append(line[: ends[0] + 1] if ends else line)
    return sequences, result.sequences_scores.tolist()


@pytest.mark.parametrize("end_token_ids", [(), (7,), (2, 9, 21)])
@pytest.mark.parametrize("length_penalty", [-0.7, 0.0, 1.0, 2.5])
@pytest.mark.parametrize("width", [2, 3, 4, 6])
def test_equals_transformers(
    model: Any, width: int, length_penalty: float, end_token_ids: tuple[int, ...]
) -> None:
    def logits_of(chains: list[list[int]]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor(chains)).logits[:, -1].float()
        return logits

    num_steps = {}
    for max_tokens in (1, 13):
        ours, num_steps[max_tokens] = search(
            logits_of, width, length_penalty, max_tokens, end_token_ids
        )
        sequences, scores = transformers_search(
            model, width, length_penalty, max_tokens, end_token_ids
        )
        assert [list(hypothesis.token_ids) for hypothesis in ours] == sequences
        assert [hypothesis.score for hypothesis in ours] == pytest.approx(scores, rel=1e-5)
        for hypothesis in ours:
            ended = hypothesis.token_ids[-1] in end_token_ids
            assert (hypothesis.finish_reason is FinishReason.STOP) == ended
            assert ended or len(hypothesis.token_ids) == max_tokens
    assert num_steps[1] == 1
    assert end_token_ids or num_steps[13] == 13


def test_one_beam_is_greedy(model: Any) -> None:
    with torch.inference_mode():
        whole = model.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=12,
        )[0, len(PROMPT) :].tolist()
        result, num_steps = search(
            lambda chains: model(torch.tensor(chains)).logits[:, -1].float(), 1, 1.0, 12
        )
    assert [list(hypothesis.token_ids) for hypothesis in result] == [whole]
    assert num_steps == 12


def table(rows: dict[tuple[int, ...], list[float]], default: list[float]) -> Logits:
    """Logits by what was generated so far."""
    return lambda chains: torch.tensor(
        [rows.get(tuple(chain[len(PROMPT) :]), default) for chain in chains]
    )


def test_an_end_beyond_the_best_beams_is_no_hypothesis() -> None:
    """Token 0 ends; it stands third, so with two beams it never counts: only the limit ends."""
    result, _ = search(table({}, [0.0, 2.0, 3.0]), 2, 1.0, 3, end_token_ids=(0,))
    assert all(hypothesis.finish_reason is FinishReason.LENGTH for hypothesis in result)
    assert result[0].token_ids == (2, 2, 2)


def test_stops_when_no_live_beam_can_improve() -> None:
    """After token 1 or 2 the end is nearly certain; the best live beam falls far behind."""
    surely_ends = [20.0, 0.0, 0.0]
    result, num_steps = search(table({(): [-5.0, 1.0, 1.2]}, surely_ends), 2, 1.0, 30, (0,))
    assert num_steps == 2
    assert [hypothesis.token_ids for hypothesis in result] == [(2, 0), (1, 0)]
    assert [hypothesis.finish_reason for hypothesis in result] == [FinishReason.STOP] * 2


def test_a_length_penalty_below_zero_favours_short_hypotheses() -> None:
    logits = table({}, [1.5, 1.6, 1.4, -9.0])
    short = search(logits, 2, -3.0, 6, end_token_ids=(0,))[0]
    long = search(logits, 2, 3.0, 6, end_token_ids=(0,))[0]
    assert short[0].token_ids == (0,)
    assert len(long[0].token_ids) == 6


def test_the_score_is_the_sum_over_the_length_to_the_penalty() -> None:
    (best, second), _ = search(table({}, [0.3, 0.9, 0.1, 0.2]), 2, 0.75, 4, end_token_ids=(2,))
    logprob = float(torch.tensor([0.3, 0.9, 0.1, 0.2]).log_softmax(0)[1])
    assert best.token_ids == (1, 1, 1, 1)
    assert best.cumulative_logprob == pytest.approx(4 * logprob, rel=1e-6)
    assert best.score == pytest.approx(4 * logprob / 4**0.75, rel=1e-6)
    assert second.score <= best.score


def test_a_stop_token_ends_with_its_id_and_an_end_token_without() -> None:
    def new_search() -> BeamSearch:
        return BeamSearch(
            3, 1.0, num_prompt_tokens=2, max_num_tokens=4, end_token_ids=[5], stop_token_ids=[5, 6]
        )

    beams = new_search()
    steps = beams.advance([[(5, -0.5), (6, -0.75), (1, -1.0), (2, -2.0), (3, -4.0)]])
    assert steps == [BeamStep(0, 1, -1.0), BeamStep(0, 2, -2.0), BeamStep(0, 3, -4.0)]
    beams.advance([[(6, -0.25), (1, -8.0)], [(1, -9.0), (2, -9.5)], [(1, -9.0), (2, -9.0)]])
    assert not beams.num_live
    # In the last step (6) stands first and ends as a stop; (1,1) and (2,1) end by the length limit,
    # and one of them loses its place to what ended before.
    assert beams.hypotheses() == [
        Hypothesis((5,), -0.5, -0.5, FinishReason.STOP, None),
        Hypothesis((1, 6), -0.625, -1.25, FinishReason.STOP, 6),
        Hypothesis((6,), -0.75, -0.75, FinishReason.STOP, 6),
    ]


def test_ties_go_to_the_earlier_beam_and_the_candidate_named_first() -> None:
    beams = BeamSearch(3, 1.0, num_prompt_tokens=1, max_num_tokens=9)
    first = beams.advance([[(4, -1.0), (7, -1.0), (2, -1.0), (0, -1.0)]])
    assert [step.token_id for step in first] == [4, 7, 2]
    second = beams.advance([[(0, -1.0), (1, -1.0)]] * 3)
    assert [(step.parent, step.token_id) for step in second] == [(0, 0), (0, 1), (1, 0)]


def test_an_equal_hypothesis_does_not_displace_an_earlier_one() -> None:
    beams = BeamSearch(1, 1.0, num_prompt_tokens=1, max_num_tokens=9, end_token_ids=[0])
    steps = beams.advance([[(0, -1.0), (1, -1.0)]])
    assert steps == [], "a live beam that is only as good as the worst hypothesis can't enter"
    assert [hypothesis.token_ids for hypothesis in beams.hypotheses()] == [(0,)]


def test_scores_are_rounded_to_fp32_as_tensors_are() -> None:
    beams = BeamSearch(1, 1.0, num_prompt_tokens=1, max_num_tokens=99)
    total = torch.tensor(0.0)
    for index in range(40):
        logprob = float(torch.tensor(-1.0 / (index + 3)))
        total += logprob
        (step,) = beams.advance([[(index, logprob)]])
        assert step.cumulative_logprob == total.item()


def test_a_tiny_vocabulary_has_fewer_beams_than_asked_for_at_first() -> None:
    """Two tokens, five beams: 2, 4, then 5 live beams; the impossible token is no continuation."""
    beams = BeamSearch(5, 1.0, num_prompt_tokens=1, max_num_tokens=5)
    two = [(0, math.log(0.6)), (1, math.log(0.4)), (2, -math.inf)]
    widths = []
    while beams.num_live:
        widths.append(len(beams.advance([two] * beams.num_live)))
    assert widths == [2, 4, 5, 0]
    result = beams.hypotheses()
    every = {
        chain: math.fsum(two[token][1] for token in chain)
        for chain in itertools.product((0, 1), repeat=4)
    }
    assert len(result) == 5
    assert result[0].token_ids == max(every, key=lambda chain: every[chain])
    assert all(
        hypothesis.cumulative_logprob == pytest.approx(every[hypothesis.token_ids], rel=1e-6)
        for hypothesis in result
    )


def test_a_search_in_which_all_ends_is_done() -> None:
    """A vocabulary of end tokens: one hypothesis for each, and no beam to go on with."""
    beams = BeamSearch(2, 1.0, num_prompt_tokens=1, max_num_tokens=9, end_token_ids=[0, 1])
    assert beams.advance([[(1, -0.1), (0, -2.0)]]) == []
    assert not beams.num_live
    assert [hypothesis.token_ids for hypothesis in beams.hypotheses()] == [(1,), (0,)]


def test_hypotheses_may_be_read_before_the_end() -> None:
    beams = BeamSearch(2, 1.0, num_prompt_tokens=1, max_num_tokens=9, end_token_ids=[0])
    beams.advance([[(0, -1.0), (3, -2.0), (4, -3.0)]])
    assert beams.num_live
    assert [hypothesis.token_ids for hypothesis in beams.hypotheses()] == [(0,)]


def test_many_steps_link_and_unlink_without_recursion() -> None:
    """Chains share their past by links: 20,000 of them, more than the interpreter's stack holds."""
    beams = BeamSearch(2, 1.0, num_prompt_tokens=1, max_num_tokens=20_001)
    for _ in range(20_000):
        beams.advance([[(0, -0.5), (1, -1.0)]] * beams.num_live)
    assert not beams.num_live
    best, second = beams.hypotheses()
    assert best.token_ids == (0,) * 20_000
    assert sum(second.token_ids) == 1


def test_the_wrong_number_of_beams_is_refused() -> None:
    beams = BeamSearch(2, 1.0, num_prompt_tokens=1, max_num_tokens=9)
    with pytest.raises(AssertionError, match="continuations of 2 beams, but 1 live"):
        beams.advance([[(0, -1.0)], [(0, -1.0)]])
