"""Text, stop strings, deltas and log-probabilities from sequence outputs."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from quire.core.request import FinishReason, Request, SequenceOutput
from quire.core.sampling_params import (
    BeamSearchParams,
    DecodingParams,
    SamplingParams,
    sampling_params_of,
)
from quire.core.step import TokenLogprobs
from quire.engine_client.outputs import RequestAssembler
from quire.hub.model_folder import EMBEDDED_MODEL
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
        delta = target.pop_delta(0)
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


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"logprobs": 1, "skip_special_tokens": False},
        {"stop": ["🙂 o", "s.p"], "logprobs": 1},
        {"stop": ["é🙂"], "include_stop_str_in_output": True},
        {"stop": ["🙂", "path"], "min_tokens": 6},
        {"stop": [".path and more"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_any_split_of_the_tokens_into_outputs_gives_the_same(
    tokenizer: Tokenizer, params: dict[str, Any], finish: FinishReason
) -> None:
    """An output has several tokens if a step accepted drafts."""
    ids = tokenizer.encode("é🙂<|im_end|> os.path")
    assert len(ids) < 13
    ids += [END] if finish is FinishReason.STOP else []
    logprobs = [
        TokenLogprobs(token_id, -at, at, (7, 8), (-0.5, -9.0)) for at, token_id in enumerate(ids)
    ]
    found = []
    for cuts in itertools.product((True, False), repeat=len(ids) - 1):
        target = assembler(tokenizer, SamplingParams(**params))
        ends = [at for at, is_cut in enumerate(cuts, 1) if is_cut] + [len(ids)]
        deltas, aborts = [], []
        for begin, end in itertools.pairwise([0, *ends]):
            aborts += target.push(
                SequenceOutput(
                    "r",
                    0,
                    ids[begin:end],
                    finish_reason=finish if end == len(ids) else None,
                    logprobs=logprobs[begin:end] if "logprobs" in params else None,
                )
            )
            deltas.append(target.pop_delta(0))
        branch = target.output.outputs[0]
        assert "".join(delta.text for delta in deltas) == branch.text
        assert [token for delta in deltas for token in delta.token_ids] == branch.token_ids
        entries = [entry for delta in deltas for entry in delta.logprobs]
        assert entries == (logprobs[: len(branch.token_ids)] if "logprobs" in params else [])
        # The engine has to end the branch, unless its own end came with the stop string.
        is_early = isinstance(branch.stop_reason, str) and len(branch.token_ids) <= begin
        assert aborts == [0] * is_early
        found.append(branch)
    assert all(branch == found[0] for branch in found)


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
    assert target.pop_delta(1).text == tokenizer.decode([right])


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
    assert list(target.pop_delta(0).logprobs) == list(entries)


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


def failed(token_ids: Sequence[int]) -> SequenceOutput:
    """An error behind accepted drafts, each with a log-probability."""
    entries = tuple([TokenLogprobs(token_id, -0.5, 1, (), ()) for token_id in token_ids])
    return SequenceOutput(
        "r", 0, tuple(token_ids), 0, FinishReason.ERROR, logprobs=entries, error="broken"
    )


def test_tokens_before_an_error_are_kept_with_their_logprobs(tokenizer: Tokenizer) -> None:
    target = assembler(tokenizer, SamplingParams(logprobs=0))
    ids = tokenizer.encode("return x")
    assert target.push(failed(ids)) == []
    delta, branch = target.pop_delta(0), target.output.outputs[0]
    assert (delta.text, delta.token_ids, len(delta.logprobs)) == ("return x", ids, len(ids))
    assert delta.finish_reason is None
    assert (branch.text, branch.token_ids, branch.finish_reason) == ("return x", ids, "error")
    assert branch.logprobs is not None
    assert [[*entry] for entry in branch.logprobs] == [[token_id] for token_id in ids]
    assert target.error == target.output.error == "broken"


def test_a_stop_string_before_an_error_ends_the_branch_without_it(tokenizer: Tokenizer) -> None:
    target = assembler(tokenizer, SamplingParams(stop=["!"], logprobs=0))
    target.push(failed(tokenizer.encode("a ! b")))
    branch = target.output.outputs[0]
    assert (branch.text, branch.finish_reason, branch.stop_reason) == ("a ", "stop", "!")
    assert target.error is None
    target.push(failed([]))  # the engine's, before it ended the branch
    assert target.error is None


def test_without_a_tokenizer_there_are_ids_only() -> None:
    target = assembler(None, SamplingParams(logprobs=0))
    feed(target, [9], FinishReason.LENGTH, logprobs=(TokenLogprobs(9, -1.0, 1, (), ()),))
    branch = target.output.outputs[0]
    assert (branch.text, branch.token_ids) == ("", [9])
    assert branch.logprobs is not None and branch.logprobs[0][9].decoded_token is None


def test_a_beam_comes_whole_with_its_log_probability(tokenizer: Tokenizer) -> None:
    request = Request("r", [5], DecodingParams(max_tokens=9, beam_width=2), n=2)
    beams = BeamSearchParams(beam_width=2)
    target = RequestAssembler(request, sampling_params_of(beams), tokenizer, "print")
    ids = tokenizer.encode("def f(x):")
    for index, logprob in enumerate((-1.5, -2.5)):
        new = SequenceOutput("r", index, ids, 0, FinishReason.LENGTH, cumulative_logprob=logprob)
        assert target.push(new) == []
    assert target.finished
    assert [beam.cumulative_logprob for beam in target.output.outputs] == [-1.5, -2.5]
    assert [beam.text for beam in target.output.outputs] == ["def f(x):"] * 2
    assert [beam.logprobs for beam in target.output.outputs] == [None, None]


def test_a_delta_merges_what_came_since_the_last_and_tells_the_end_once(
    tokenizer: Tokenizer,
) -> None:
    target = assembler(tokenizer, SamplingParams(logprobs=0))
    ids = tokenizer.encode("def f(x): return x")
    entries = [TokenLogprobs(token_id, -0.5, 1, (), ()) for token_id in ids]
    for token_id, entry in zip(ids[:-1], entries, strict=False):
        feed(target, [token_id], logprobs=(entry,))
    first = target.pop_delta(0)
    assert (first.text, first.token_ids) == (tokenizer.decode(ids[:-1]), ids[:-1])
    assert (list(first.logprobs), first.finish_reason) == (entries[:-1], None)
    feed(target, ids[-1:], FinishReason.LENGTH, logprobs=(entries[-1],))
    last, nothing = target.pop_delta(0), target.pop_delta(0)
    assert (last.token_ids, list(last.logprobs), last.finish_reason) == (
        ids[-1:],
        entries[-1:],
        "length",
    )
    assert first.text + last.text == tokenizer.decode(ids)
    assert (nothing.text, nothing.token_ids, len(nothing.logprobs)) == ("", [], 0)
    assert nothing.finish_reason is None


def test_looking_at_the_output_takes_nothing_from_the_deltas(tokenizer: Tokenizer) -> None:
    target = assembler(tokenizer, SamplingParams(logprobs=0))
    ids = tokenizer.encode("one two three")
    seen = []
    for token_id in ids:
        feed(target, [token_id], logprobs=(TokenLogprobs(token_id, -1.0, 1, (), ()),))
        branch = target.output.outputs[0]
        assert branch.logprobs is not None and len(branch.logprobs) == len(branch.token_ids)
        seen.append(branch.text)
    assert seen == [tokenizer.decode(ids[: end + 1]) for end in range(len(ids))]
    assert target.pop_delta(0).text == tokenizer.decode(ids)


def test_with_deltas_only_texts_and_logprobs_are_kept_nowhere_else(tokenizer: Tokenizer) -> None:
    params = SamplingParams(logprobs=1, prompt_logprobs=0, stop=["!"])
    request = Request("r", tokenizer.encode("print"), DecodingParams(max_tokens=99))
    target = RequestAssembler(request, params, tokenizer, "print", deltas_only=True)
    ids = tokenizer.encode("one two! three")
    entry = TokenLogprobs(7, -2.0, 3, (8,), (-0.25,))
    aborts = feed(target, ids, logprobs=(entry,), prompt_logprobs=(entry,))
    branch = target.output.outputs[0]
    assert (branch.text, branch.logprobs) == ("", None)
    assert (branch.finish_reason, branch.stop_reason) == ("stop", "!")
    assert branch.cumulative_logprob == -2.0 * len(branch.token_ids)
    assert target.output.prompt_logprobs is None
    assert target.prompt_entries is not None and list(target.prompt_entries) == [entry]
    assert [0] in aborts
    delta = target.pop_delta(0)
    assert (delta.text, delta.token_ids) == ("one two", branch.token_ids)
    assert list(delta.logprobs) == [entry] * len(branch.token_ids)
    assert (delta.finish_reason, delta.stop_reason) == ("stop", "!")


def test_cached_tokens_are_those_of_the_first_admission(tokenizer: Tokenizer) -> None:
    target = assembler(tokenizer, SamplingParams(n=2), n=2)
    for branch, num_cached in ((1, 48), (0, 16), (0, 32)):  # the last: after a crash
        target.push(SequenceOutput("r", branch, (10,), num_cached))
    assert target.output.num_cached_tokens == 16


def test_a_fork_begins_with_its_parents_text_but_tells_only_its_own(tokenizer: Tokenizer) -> None:
    params = SamplingParams(logprobs=0)
    target = assembler(tokenizer, params)
    start, own = tokenizer.encode("left"), tokenizer.encode(" right")
    entry = TokenLogprobs(5, -1.0, 1, (), ())
    feed(target, start, logprobs=(entry,))
    index = target.add_branch(0, params)
    for token_id in own:
        target.push(SequenceOutput("r", index, (token_id,), logprobs=(entry,)))
    branch, delta = target.output.outputs[index], target.pop_delta(index)
    assert (branch.text, branch.token_ids) == ("left right", [*start, *own])
    assert branch.cumulative_logprob == -1.0 * len(branch.token_ids)
    assert (delta.text, delta.token_ids) == (" right", own)
    assert list(delta.logprobs) == [entry] * len(own)


def test_without_detokenize_there_are_token_ids_only(tokenizer: Tokenizer) -> None:
    target = assembler(tokenizer, SamplingParams(detokenize=False, logprobs=0))
    ids = tokenizer.encode("os.path")
    feed(target, ids, FinishReason.LENGTH, logprobs=[TokenLogprobs(ids[0], -0.5, 1, (), ())])
    branch = target.output.outputs[0]
    assert (branch.text, branch.token_ids) == ("", ids)
    assert branch.logprobs and branch.logprobs[0][ids[0]].decoded_token is None
