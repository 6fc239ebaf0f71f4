"""Text, stop strings, deltas and log-probabilities from sequence outputs."""

from collections.abc import Sequence

import pytest

from quire.core.request import FinishReason, Request, SequenceOutput
from quire.core.sampling_params import BeamSearchParams, DecodingParams, SamplingParams
from quire.core.step import TokenLogprobs
from quire.engine.outputs import RequestAssembler
from quire.models.hub import EMBEDDED_MODEL
from quire.text.tokenizer import Tokenizer

END = 2


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(EMBEDDED_MODEL)


def assembler(tokenizer: Tokenizer | None, params: SamplingParams, n: int = 1) -> RequestAssembler:
    prompt = [5, 6] if tokenizer is None else tokenizer.encode("print")
    request = Request("r", prompt, DecodingParams(max_tokens=99), n)
    return RequestAssembler(request, params, tokenizer, "print")


def feed(
    target: RequestAssembler,
    token_ids: Sequence[int],
    finish: FinishReason | None = None,
    **fields: object,
) -> list[list[int]]:
    """One output a token; `finish` comes with the last. Returns what push returned."""
    last = len(token_ids) - 1
    return [
        target.push(
            SequenceOutput("r", 0, (token_id,), 0, finish if index == last else None, **fields)
        )
        for index, token_id in enumerate(token_ids)
    ]


def test_text_is_what_the_tokenizer_says(tokenizer: Tokenizer) -> None:
    target = assembler(tokenizer, SamplingParams())
    ids = tokenizer.encode(" naïve 你好 🙂 os.path")
    feed(target, ids, FinishReason.LENGTH)
    branch = target.output.outputs[0]
    assert branch.text == " naïve 你好 🙂 os.path"
    assert branch.token_ids == ids
    assert (branch.finish_reason, target.finished) == ("length", True)


def test_deltas_add_up_and_never_split_a_character(tokenizer: Tokenizer) -> None:
    target = assembler(tokenizer, SamplingParams())
    ids = tokenizer.encode("a 🙂 b")
    pieces, tokens = [], []
    for index, token_id in enumerate(ids):
        feed(target, [token_id], FinishReason.LENGTH if index == len(ids) - 1 else None)
        delta = target.take_delta(0)
        pieces.append(delta.text)
        tokens += delta.token_ids
        assert "\ufffd" not in delta.text
    assert "".join(pieces) == "a 🙂 b"
    assert tokens == ids
    assert delta.finish_reason == "length"


def test_the_end_token_is_in_the_ids_but_not_in_the_text(tokenizer: Tokenizer) -> None:
    for params, text in (
        (SamplingParams(), "x"),
        (SamplingParams(skip_special_tokens=False), "x"),
        (
            SamplingParams(skip_special_tokens=False, include_stop_str_in_output=True),
            "x<|im_end|>",
        ),
    ):
        target = assembler(tokenizer, params)
        ids = [*tokenizer.encode("x"), END]
        feed(target, ids, FinishReason.STOP)
        assert target.output.outputs[0].text == text
        assert target.output.outputs[0].token_ids == ids


def test_a_stop_string_over_several_tokens_ends_the_branch_at_its_token(
    tokenizer: Tokenizer,
) -> None:
    target = assembler(tokenizer, SamplingParams(stop=["os.path.join"]))
    ids = tokenizer.encode("use os.path.join here and there")
    aborts = feed(target, ids)
    branch = target.output.outputs[0]
    assert branch.text == "use "
    assert (branch.finish_reason, branch.stop_reason) == ("stop", "os.path.join")
    end = len(branch.token_ids)
    assert tokenizer.decode(branch.token_ids) == "use os.path.join"
    assert aborts == [[]] * (end - 1) + [[0]] + [[]] * (len(ids) - end)
    assert target.output.outputs[0].token_ids == ids[:end]


def test_text_that_only_began_a_stop_string_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    target = assembler(tokenizer, SamplingParams(stop=["path!"]))
    feed(target, tokenizer.encode("os.path"), FinishReason.LENGTH)
    assert target.output.outputs[0].text == "os.path"


def test_min_tokens_disarms_stop_strings(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a b a b a b")
    target = assembler(tokenizer, SamplingParams(stop=["b"], min_tokens=4))
    feed(target, ids)
    output = target.output.outputs[0]
    assert output.stop_reason == "b"
    assert len(output.token_ids) >= 4
    assert output.text == "a b a "


def test_the_engines_end_needs_no_abort(tokenizer: Tokenizer) -> None:
    target = assembler(tokenizer, SamplingParams(stop=["b"]))
    assert feed(target, tokenizer.encode(" b"), FinishReason.LENGTH)[-1] == []
    assert target.output.outputs[0].finish_reason == "stop"


def test_branches_are_independent(tokenizer: Tokenizer) -> None:
    target = assembler(tokenizer, SamplingParams(n=2), n=2)
    left, right = tokenizer.encode(" left")[0], tokenizer.encode(" right")[0]
    target.push(SequenceOutput("r", 1, (right,), 16, FinishReason.LENGTH))
    assert not target.finished
    target.push(SequenceOutput("r", 0, (left,), 32, FinishReason.LENGTH))
    assert target.finished
    assert [branch.token_ids for branch in target.output.outputs] == [[left], [right]]
    assert target.output.num_cached_tokens == 32
    assert target.take_delta(1).text == tokenizer.decode([right])


def test_logprobs(tokenizer: Tokenizer) -> None:
    target = assembler(tokenizer, SamplingParams(logprobs=2))
    entries = (
        TokenLogprobs(10, -0.5, 1, (10, 11), (-0.5, -1.0)),
        TokenLogprobs(12, -3.0, 7, (10, 11), (-0.6, -1.1)),
    )
    for entry in entries:
        feed(target, [entry.token_id], logprobs=(entry,))
    branch = target.output.outputs[0]
    assert branch.cumulative_logprob == -3.5
    assert branch.logprobs is not None
    assert [list(entry) for entry in branch.logprobs] == [[10, 11], [10, 11, 12]]
    assert branch.logprobs[1][12].rank == 7
    assert branch.logprobs[0][11].decoded_token == tokenizer.token_text(11)
    assert target.take_delta(0).logprobs == list(entries)


def test_prompt_logprobs_start_with_none(tokenizer: Tokenizer) -> None:
    target = assembler(tokenizer, SamplingParams(prompt_logprobs=0))
    entry = TokenLogprobs(6, -1.5, 3, (), ())
    feed(target, [10], prompt_logprobs=(entry,))
    feed(target, [11])
    found = target.output.prompt_logprobs
    assert found is not None and found[0] is None
    assert found[1] is not None and found[1][6].rank == 3


def test_an_error_names_itself(tokenizer: Tokenizer) -> None:
    target = assembler(tokenizer, SamplingParams())
    target.push(SequenceOutput("r", 0, (), 0, FinishReason.ERROR, error="broken"))
    assert (target.finished, target.output.error) == (True, "broken")
    assert target.output.outputs[0].finish_reason == "error"


def test_without_a_tokenizer_there_are_ids_only() -> None:
    target = assembler(None, SamplingParams(logprobs=0))
    feed(target, [9], FinishReason.LENGTH, logprobs=(TokenLogprobs(9, -1.0, 1, (), ()),))
    branch = target.output.outputs[0]
    assert (branch.text, branch.token_ids) == ("", [9])
    assert branch.logprobs is not None and branch.logprobs[0][9].decoded_token is None


def test_a_beam_comes_whole_with_its_log_probability(tokenizer: Tokenizer) -> None:
    request = Request("r", [5], DecodingParams(max_tokens=9, beam_width=2), n=2)
    beams = BeamSearchParams(beam_width=2)
    target = RequestAssembler(request, beams, tokenizer, "print")
    ids = tokenizer.encode("def f(x):")
    for index, logprob in enumerate((-1.5, -2.5)):
        new = SequenceOutput("r", index, ids, 0, FinishReason.LENGTH, cumulative_logprob=logprob)
        assert target.push(new) == []
    assert target.finished
    assert [one.cumulative_logprob for one in target.output.outputs] == [-1.5, -2.5]
    assert [one.text for one in target.output.outputs] == ["def f(x):"] * 2
    assert [one.logprobs for one in target.output.outputs] == [None, None]
