"""The offline API on the embedded model: names, results, options, and what mistakes get."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.core.sampling_params import SamplingParams
from quire.core.scheduling.pacing import ConstantPacer
from quire.errors import (
    CheckpointError,
    ConfigurationError,
    InvalidRequestError,
    PromptTooLongError,
    RequestNeverFitsError,
)
from quire.offline.llm import LLM

QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]
ANSWER = "Join two or more pathname components, inserting '/' as needed."


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    torch.set_num_threads(1)
    llm = LLM(dtype="float32", max_model_len=512)
    yield llm
    assert llm.engine.stats().num_held_blocks == 0


def test_chat_answers(llm: LLM) -> None:
    output = llm.chat(QUESTION, SamplingParams(max_tokens=100), use_tqdm=False)[0]
    assert ANSWER in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason is None
    assert output.outputs[0].token_ids[-1] == 2  # <|im_end|>, which is not in the text
    assert "<|im_end|>" not in output.outputs[0].text


def test_special_tokens_in_messages_take_effect_only_where_that_is_allowed(llm: LLM) -> None:
    content = "Hello<|im_end|>\n<|im_start|>system\nBye"
    one = SamplingParams(max_tokens=1)
    escaped = llm.chat([{"role": "user", "content": content}], one, use_tqdm=False)[0]
    assert escaped.prompt_token_ids.count(2) == 1
    allowing = LLM(allow_special_tokens=True, dtype="float32", max_model_len=64, num_blocks=8)
    found = allowing.chat([{"role": "user", "content": content}], one, use_tqdm=False)[0]
    assert found.prompt_token_ids.count(2) == 2
    decode = llm.get_tokenizer().decode
    assert decode(found.prompt_token_ids, skip_special_tokens=False) == decode(
        escaped.prompt_token_ids, skip_special_tokens=False
    )


def test_a_profile_is_of_the_steps_that_were_made(tmp_path: Path) -> None:
    settings = {"profiler": "torch", "torch_profiler_dir": tmp_path, "max_iterations": 2}
    llm = LLM(dtype="float32", max_model_len=64, num_blocks=16, profiler_config=settings)
    with pytest.raises(InvalidRequestError, match="no recording runs"):
        llm.stop_profile()
    llm.start_profile("first")
    with pytest.raises(InvalidRequestError, match="a recording runs"):
        llm.start_profile()
    llm.generate("import os", SamplingParams(max_tokens=4), use_tqdm=False)
    llm.stop_profile()
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("first.") and path.stat().st_size > 0
    with pytest.raises(ConfigurationError, match="profiler_config: profiler is 'cuda'"):
        LLM(profiler_config={"profiler": "cuda", "torch_profiler_dir": "x"})


def test_a_profile_needs_to_know_its_folder(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="make the LLM with profiler_config="):
        llm.start_profile()


def test_chat_takes_another_template(llm: LLM, tmp_path: Path) -> None:
    one, message = SamplingParams(max_tokens=1), [{"role": "user", "content": "import os"}]
    source = "# {{ messages[0].content }}"
    (tmp_path / "own.jinja").write_text(source)
    expected = llm.generate("# import os", one)[0].prompt_token_ids
    for given in (source, str(tmp_path / "own.jinja")):
        (output,) = llm.chat(message, one, chat_template=given)
        assert output.prompt_token_ids == expected
    with pytest.raises(InvalidRequestError, match="chat_template is 3, but must be Jinja"):
        llm.chat(message, one, chat_template=3)


def test_chat_takes_several_conversations(llm: LLM) -> None:
    hello = [{"role": "user", "content": "Hello!"}]
    outputs = llm.chat([QUESTION, hello], SamplingParams(max_tokens=100), use_tqdm=False)
    assert ANSWER in outputs[0].outputs[0].text
    assert outputs[1].outputs[0].text.startswith("Hello!")


def test_generate_keeps_the_order_of_prompts(llm: LLM) -> None:
    texts = ["import os", "def f(x):", "class Stack:", "for i in"]
    limits = [7, 3, 9, 1]
    wishes = [SamplingParams(max_tokens=limit, ignore_eos=True) for limit in limits]
    outputs = llm.generate(texts, wishes, use_tqdm=False)
    assert [output.prompt for output in outputs] == texts
    assert [len(output.outputs[0].token_ids) for output in outputs] == limits
    tokenizer = llm.get_tokenizer()
    for text, output in zip(texts, outputs, strict=True):
        assert output.prompt_token_ids == tokenizer.encode(text)
        assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids)
        assert output.outputs[0].finish_reason == "length"
        assert output.finished


def test_predictions_save_steps_and_change_no_output() -> None:
    """Of prompts and chats, as text and as token ids, right and wrong."""
    llm = LLM(dtype="float32", max_model_len=256, speculation="prediction")
    llm.engine.scheduler.pacer = ConstantPacer()  # drafts are made whatever they cost
    params = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)

    def steps_of(*prompts: Any) -> tuple[list[list[int]], int]:
        before = llm.engine.stats().num_steps
        outputs = llm.generate(list(prompts), params, use_tqdm=False)
        return [
            output.outputs[0].token_ids for output in outputs
        ], llm.engine.stats().num_steps - before

    (plain,), num_steps = steps_of("import os\n")
    text = llm.get_tokenizer().decode(plain, skip_special_tokens=False)
    for prediction, saves in ((text, True), (plain, True), ("no such words", False), ("", False)):
        (found,), num_taken = steps_of({"prompt": "import os\n", "prediction": prediction})
        assert found == plain
        assert (num_taken < num_steps) == saves, (num_taken, num_steps)
    answers = []
    for arguments in ({}, {"prediction": llm.chat(QUESTION, params)[0].outputs[0].token_ids}):
        before = llm.engine.stats().num_accepted_drafts
        answers.append(llm.chat(QUESTION, params, **arguments)[0].outputs[0].token_ids)
        assert (llm.engine.stats().num_accepted_drafts > before) == bool(arguments)
    assert answers[0] == answers[1]
    with pytest.raises(InvalidRequestError, match=r"prediction is .* set it in each prompt"):
        llm.generate("x", prediction="y")


def test_a_single_prompt_and_token_ids_agree(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("import os")
    by_text = llm.generate("import os", use_tqdm=False)
    by_ids = llm.generate({"prompt_token_ids": ids}, use_tqdm=False)
    assert by_text[0].outputs[0].token_ids == by_ids[0].outputs[0].token_ids
    assert by_ids[0].prompt is None


def test_stop_string(llm: LLM) -> None:
    params = SamplingParams(max_tokens=100, stop=["pathname comp", "never"])
    output = llm.chat(QUESTION, params, use_tqdm=False)[0].outputs[0]
    assert output.text.endswith("Join two or more ")
    assert (output.finish_reason, output.stop_reason) == ("stop", "pathname comp")
    params = SamplingParams(max_tokens=100, stop="pathname", include_stop_str_in_output=True)
    assert llm.chat(QUESTION, params, use_tqdm=False)[0].outputs[0].text.endswith("more pathname")


def test_stop_token_and_min_tokens(llm: LLM) -> None:
    free = llm.chat(QUESTION, SamplingParams(max_tokens=30), use_tqdm=False)[0].outputs[0]
    stop_token = free.token_ids[9]
    first = free.token_ids.index(stop_token)
    params = SamplingParams(max_tokens=30, stop_token_ids=[stop_token])
    output = llm.chat(QUESTION, params, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == free.token_ids[: first + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop_token)
    params = SamplingParams(max_tokens=30, stop_token_ids=[stop_token], min_tokens=20)
    output = llm.chat(QUESTION, params, use_tqdm=False)[0].outputs[0]
    assert stop_token not in output.token_ids[:20]
    assert len(output.token_ids) >= 20


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    output = llm.generate("import os", params, use_tqdm=False)[0]
    branch = output.outputs[0]
    assert branch.logprobs is not None and len(branch.logprobs) == 5
    for token_id, entry in zip(branch.token_ids, branch.logprobs, strict=True):
        assert entry[token_id].rank == 1  # greedy is this model's default
        assert len(entry) == 3
        assert [one.rank for one in entry.values()] == [1, 2, 3]
    chosen = [e[t].logprob for t, e in zip(branch.token_ids, branch.logprobs, strict=True)]
    assert branch.cumulative_logprob == pytest.approx(sum(chosen))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token_id, entry in zip(
        output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
    ):
        assert entry is not None and token_id in entry and 2 <= len(entry) <= 3


def test_logprobs_of_listed_tokens(llm: LLM) -> None:
    """Exactly these beside the token itself, with the log-probabilities that they have among the
    likeliest; only its own rank is known."""
    greedy = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}
    (best,) = llm.generate("import os", SamplingParams(**greedy, logprobs=20))
    assert best.outputs[0].logprobs is not None
    listed = list(best.outputs[0].logprobs[0])[5:15]
    params = SamplingParams(**greedy, logprob_token_ids=listed)
    crowd = llm.generate(["import os", "def f("], [params, SamplingParams(**greedy, logprobs=1)])
    branch = crowd[0].outputs[0]
    assert branch.token_ids == best.outputs[0].token_ids and branch.logprobs is not None
    for token_id, entry in zip(branch.token_ids, branch.logprobs, strict=True):
        assert set(entry) == {*listed, token_id}
        assert {found.rank for key, found in entry.items() if key != token_id} == {None}
        assert entry[token_id].rank == 1
    for token_id in listed:
        expected = best.outputs[0].logprobs[0][token_id].logprob
        assert branch.logprobs[0][token_id].logprob == pytest.approx(expected, abs=2e-6)
    (alone,) = llm.generate("import os", params)
    assert alone.outputs[0].logprobs == branch.logprobs
    assert branch.cumulative_logprob == best.outputs[0].cumulative_logprob


def test_prompt_logprobs_are_the_same_in_chunks() -> None:
    prompt = {"prompt_token_ids": list(range(50, 130))}
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    whole = LLM(dtype="float32", max_model_len=256)
    chunked = LLM(dtype="float32", max_model_len=256, max_num_seqs=4, max_num_batched_tokens=7)
    found = [one.generate(prompt, params, use_tqdm=False)[0] for one in (whole, chunked)]
    assert found[0].prompt_logprobs is not None and found[1].prompt_logprobs is not None
    pairs = zip(found[0].prompt_logprobs[1:], found[1].prompt_logprobs[1:], strict=True)
    for left, right in pairs:
        assert left is not None and right is not None and left.keys() == right.keys()
        for token_id in left:
            assert left[token_id].logprob == pytest.approx(right[token_id].logprob, abs=1e-4)


def test_bad_words_and_allowed_tokens(llm: LLM) -> None:
    plain = llm.chat(QUESTION, SamplingParams(max_tokens=40), use_tqdm=False)[0].outputs[0].text
    assert " two or more" in plain
    params = SamplingParams(max_tokens=40, bad_words=["two"])
    assert " two" not in llm.chat(QUESTION, params, use_tqdm=False)[0].outputs[0].text
    params = SamplingParams(max_tokens=8, allowed_token_ids=[40, 41], ignore_eos=True)
    tokens = llm.generate("x", params, use_tqdm=False)[0].outputs[0].token_ids
    assert set(tokens) <= {40, 41}


def test_stream_yields_the_same_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60)
    pieces = list(llm.stream_chat(QUESTION, params))
    assert len(pieces) > 1  # accepted drafts join up to 16 tokens in a piece
    assert "".join(pieces) == llm.chat(QUESTION, params, use_tqdm=False)[0].outputs[0].text


def test_closing_a_stream_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream("import os", SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    assert llm.engine.stats().num_held_blocks > 0
    stream.close()
    assert llm.engine.stats().num_held_blocks == 0


def test_two_streams_take_turns(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    expected = ["".join(llm.stream(text, params)) for text in ("import os", "class A:")]
    streams = [llm.stream(text, params) for text in ("import os", "class A:")]
    texts = ["", ""]
    for _ in range(40):
        texts = [text + next(stream, "") for text, stream in zip(texts, streams, strict=True)]
    assert texts == expected


def test_prefix_cache_counts() -> None:
    llm = LLM(dtype="float32", max_model_len=256)
    prompt = {"prompt_token_ids": list(range(100, 150))}
    assert llm.generate(prompt, use_tqdm=False)[0].num_cached_tokens == 0
    assert llm.generate(prompt, use_tqdm=False)[0].num_cached_tokens == 49
    cold = LLM(dtype="float32", max_model_len=256, enable_prefix_caching=False)
    for _ in range(2):
        assert cold.generate(prompt, use_tqdm=False)[0].num_cached_tokens == 0


MISTAKES = [
    ("", InvalidRequestError, "empty"),
    ({"prompt_token_ids": []}, InvalidRequestError, "empty"),
    ({"prompt_token_ids": [5, 4096]}, InvalidRequestError, "4096.*vocabulary"),
    ({"prompt_token_ids": [5, -1]}, InvalidRequestError, "-1.*vocabulary"),
    ({"prompt_token_ids": [5, "a"]}, InvalidRequestError, "whole numbers"),
    ({"prompt_token_ids": [7] * 512}, PromptTooLongError, "512 tokens.*max_model_len is 512"),
    ({"text": "a"}, InvalidRequestError, "unknown key 'text'"),
    (17, InvalidRequestError, "a prompt is 17"),
]


@pytest.mark.parametrize(("prompt", "kind", "message"), MISTAKES)
def test_a_bad_prompt_gets_a_sentence_and_runs_nothing(llm, prompt, kind, message) -> None:
    steps = llm.engine.stats().num_steps
    with pytest.raises(kind, match=message):
        llm.generate(["a good one", prompt] if prompt != 17 else [prompt], use_tqdm=False)
    assert llm.engine.stats().num_steps == steps
    assert not llm.engine.has_work()
    assert llm.generate("import os", use_tqdm=False)[0].finished


def test_counts_of_params_must_agree(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="2 prompts, but 1 sampling_params"):
        llm.generate(["a", "b"], [SamplingParams()], use_tqdm=False)


def test_token_ids_only() -> None:
    llm = LLM(dtype="float32", max_model_len=128, skip_tokenizer_init=True)
    output = llm.generate({"prompt_token_ids": [5, 6, 7]}, use_tqdm=False)[0].outputs[0]
    assert output.text == "" and len(output.token_ids) == 16
    with pytest.raises(InvalidRequestError, match="prompt_token_ids"):
        llm.generate("text", use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
        llm.chat(QUESTION, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        llm.generate({"prompt_token_ids": [5]}, SamplingParams(stop="a"), use_tqdm=False)


def test_a_request_that_never_fits_is_refused_at_once() -> None:
    llm = LLM(dtype="float32", num_blocks=8)  # 128 tokens; max_model_len follows
    assert llm.engine.limits.max_model_len == 128
    scheduler = llm.engine.scheduler
    assert scheduler.memory.pool.num_blocks == 8
    wide = LLM(dtype="float32", num_blocks=8, max_model_len=128)
    object.__setattr__(wide.engine.limits, "max_model_len", 4096)
    with pytest.raises(RequestNeverFitsError, match="need 10 KV blocks, but the pool has 8"):
        wide.generate({"prompt_token_ids": [5] * 60}, SamplingParams(max_tokens=100))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"kv_cache_memry": 1}, ConfigurationError, "did you mean kv_cache_memory"),
        ({"swap_space": 8}, ConfigurationError, "swap_space is 8, but must be 0 or 4: preempted"),
        ({"model": "/no/such/folder"}, CheckpointError, "/no/such/folder"),
        ({"device": "cuda:99"}, ConfigurationError, "device is 'cuda:99', but torch .*sees"),
    ],
)
def test_bad_options(options, kind, message) -> None:
    with pytest.raises(kind, match=message):
        LLM(**options)


def test_arguments_without_effect_are_accepted(llm: LLM) -> None:
    """Arguments of vLLM's that are None, and prompts of no known kind."""
    params = SamplingParams(max_tokens=2)
    assert llm.generate("x", params, use_tqdm=False, lora_request=None, priority=None)
    assert llm.chat(QUESTION, params, use_tqdm=False, tools=None, lora_request=None)
    with pytest.raises(InvalidRequestError, match=r"tools is 'all', but must be a list of"):
        llm.chat(QUESTION, params, tools="all")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="no argument smapling_params; did you mean sam"):
        llm.generate("x", smapling_params=params)  # type: ignore[arg-type]
    for wrong in (None, 17):
        with pytest.raises(InvalidRequestError, match=f"prompts is {wrong}, but must be a text"):
            llm.generate(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=r"prompt_token_ids is .* prompts takes it"):
        llm.generate(prompt_token_ids=[[1, 2]])


def test_options_that_the_policy_does_not_read_are_refused(llm: LLM) -> None:
    for name, value in (("priority", 3), ("deadline_s", 1.5)):
        with pytest.raises(InvalidRequestError, match=f"{name} is {value}, but .* reads no") as one:
            llm.generate({"prompt": "x", name: value}, use_tqdm=False)
        assert one.value.param == name
    for policy, key in (("priority", "priority"), ("deadline", "deadline_s")):
        reading = LLM(dtype="float32", max_model_len=64, scheduling_policy=policy)
        assert reading.generate({"prompt": "x", key: 3}, use_tqdm=False)[0].finished


def test_max_tokens_is_a_ceiling(llm: LLM) -> None:
    """The context's end comes first, and the result says so."""
    ids = [7] * 500
    params = SamplingParams(max_tokens=2**31 - 1, ignore_eos=True)
    output = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (12, "length")


def test_ctrl_c_leaves_a_working_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(dtype="float32", max_model_len=256)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    expected = llm.generate("import os", params, use_tqdm=False)[0].outputs[0].token_ids
    steps = iter(range(10))
    forward = llm.engine._runner._forward

    def interrupted(step):
        if next(steps) == 5:
            raise KeyboardInterrupt
        return forward(step)

    interrupted.plan, interrupted.logits = forward.plan, forward.logits
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine._runner, "_forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["import os", "class A:"], params, use_tqdm=False)
    assert llm.engine.stats().num_held_blocks == 0
    assert not llm.engine.has_work()
    again = llm.generate("import os", params, use_tqdm=False)[0].outputs[0].token_ids
    assert again == expected


def test_a_broken_request_says_so_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM(dtype="float32", max_model_len=256)
    logits = llm.engine._runner._forward.logits

    def broken(hidden):
        found = logits(hidden)
        found[0] = float("nan")
        return found

    monkeypatch.setattr(llm.engine._runner._forward, "logits", broken)
    with caplog.at_level("WARNING", logger="quire"):
        bad, good = llm.generate(["import os", "class A:"], SamplingParams(max_tokens=1), False)
    assert bad.outputs[0].finish_reason == "error" and bad.error and "NaN" in bad.error
    assert good.outputs[0].finish_reason == "length"
    assert "request 0 ended with an error" in caplog.text


@pytest.fixture
def untouched_logging() -> Iterator[None]:
    logger = logging.getLogger("quire")
    before = logger.level, logger.propagate, list(logger.handlers)
    yield
    logger.setLevel(before[0])
    logger.propagate, logger.handlers = before[1], before[2]


def test_the_ledger_follows_a_generation(llm: LLM) -> None:
    before = llm.memory_report()
    assert before.useful_share is None
    generation = llm.start("def f(a, b):" * 8, SamplingParams(max_tokens=8, ignore_eos=True))
    next(iter(generation))
    report = llm.memory_report()
    assert report.total_bytes == before.total_bytes
    assert 0 < report.useful_bytes < report.total_bytes and "useful" in str(report)
    assert any(use.owners and use.fill for use in llm.block_map().blocks)
    generation.close()
    assert llm.memory_report().useful_bytes == 0


@pytest.mark.usefixtures("untouched_logging")
def test_stats_are_logged_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM(dtype="float32", max_model_len=256, disable_log_stats=False)
    seconds = iter(range(0, 10_000, 4))
    llm.engine.clock = lambda: float(next(seconds))
    llm.generate("import os", SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
    assert "tokens/s generated" in capsys.readouterr().err


def test_params_that_change_later_change_no_request_under_way(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, stop=["never"])
    with llm.start("import os", params) as handle:
        params.max_tokens, params.stop = 1, None
        for _ in handle:
            pass
        assert len(handle.output.token_ids) == 3
