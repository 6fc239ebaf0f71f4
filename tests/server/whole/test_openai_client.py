"""Every field of both APIs through OpenAI's own clients, streamed and not: each is seen to have its
effect."""

import json
import uuid

import openai
import pytest
from tests.server.asking import CHAT, COMPLETIONS, PROMPT, QUESTION, Asker, Clients

from quire.server.routes.openai.chat_body import ChatCompletionRequest
from quire.server.routes.openai.completions import CompletionRequest

MODELS = {COMPLETIONS: CompletionRequest, CHAT: ChatCompletionRequest}
# To the server both clients are the same, so each way of answering is asked for by one of them.
MODES = ("sync", "async-stream")
WHOLE, STREAMED = ("async",), ("sync-stream",)

END, START = 2, 1  # the embedded model's <|im_end|>, which ends an answer, and <|im_start|>
ONLY_END, ONLY_START = {str(END): 100}, {str(START): 100}

CASES = []


def drives(*names, apis=(COMPLETIONS, CHAT), modes=MODES):
    """The function shows the effect of these fields, sent in each of these ways."""

    def register(function):
        CASES.append((function, names, apis, modes))
        return function

    return register


@drives("model")
def the_model_is_named(ask, tokenizer):
    assert ask(model=None).texts == ask(model="embedded").texts
    with pytest.raises(openai.NotFoundError, match="this server has 'embedded'"):
        ask(model="other")


@drives("prompt", apis=[COMPLETIONS])
def a_prompt_has_four_forms(ask, tokenizer):
    ids, others = tokenizer.encode(PROMPT), tokenizer.encode("def f(")
    texts = ask().texts
    assert ask(prompt=[PROMPT]).texts == ask(prompt=ids).texts == ask(prompt=[ids]).texts == texts
    both = ask(prompt=[PROMPT, "def f("])
    assert both.texts == texts + ask(prompt="def f(").texts
    assert both.texts == ask(prompt=[ids, others]).texts
    assert both.usage.prompt_tokens == len(ids) + len(others)


@drives("messages", apis=[CHAT])
def messages_have_roles_parts_and_names(ask, tokenizer):
    question, text = QUESTION[0], QUESTION[0]["content"]
    parts = {"role": "user", "name": "ada", "content": [{"type": "text", "text": text}]}
    assert ask(messages=[parts]).texts == ask(messages=[question]).texts
    rules = {"role": "system", "content": "You explain Python's standard library."}
    asked = {"max_tokens": 1, "return_token_ids": True}
    prompts = [
        ask(messages=[{**rules, "role": role}, question], **asked).prompt_token_ids[0]
        for role in ("system", "developer", "tool")
    ]
    assert tokenizer.decode(prompts[0]).count(rules["content"]) == 1
    assert prompts[0] == prompts[1] != prompts[2]  # the template knows no developer
    history = [question, {"role": "assistant", "content": "It joins paths.", "refusal": None}]
    longer = ask(messages=[*history, question], **asked).prompt_token_ids[0]
    assert "It joins paths." in tokenizer.decode(longer)


@drives("n")
def there_are_n_choices(ask, tokenizer):
    answer = ask(n=3, temperature=1.5, seed=4)
    assert len(answer.texts) == 3
    assert len(set(answer.texts)) > 1
    assert answer.usage.completion_tokens <= 24


@drives("suffix", apis=[COMPLETIONS])
def a_gap_needs_a_model_that_knows_gaps(ask, tokenizer):
    with pytest.raises(openai.BadRequestError, match="no tokens for filling a gap") as caught:
        ask(suffix="end")
    assert caught.value.param == "suffix"
    assert ask(suffix="").texts == ask().texts


@drives("best_of", apis=[COMPLETIONS])
def the_best_of_n_are_all(ask, tokenizer):
    assert ask(n=2, best_of=2).texts == ask(n=2).texts
    with pytest.raises(openai.BadRequestError, match="best of more than n") as caught:
        ask(n=2, best_of=3)
    assert caught.value.param == "best_of"


@drives("temperature", "top_p", "top_k", "min_p")
def sampling_is_as_wild_as_asked(ask, tokenizer):
    greedy, wild = ask().texts, {"temperature": 8.0, "seed": 1}
    assert ask(**wild).texts != greedy
    for option in ({"top_p": 1e-6}, {"top_k": 1}, {"min_p": 1.0}):
        assert ask(**wild, **option).texts == greedy, option


@drives("presence_penalty", "frequency_penalty", "repetition_penalty")
def penalties_change_what_is_repeated(ask, tokenizer):
    # Out of a few tokens, so that some come again.
    few = {"allowed_token_ids": list(range(300, 316)), "temperature": 1.0, "seed": 3}
    long = {"max_tokens": 24, "ignore_eos": True} | few
    texts = ask(**long).texts
    for option in (
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 1.8},
    ):
        assert ask(**long, **option).texts != texts, option


@drives("seed")
def a_seed_repeats_an_answer(ask, tokenizer):
    first = ask(temperature=1.5, seed=-5).texts
    assert ask(temperature=1.5, seed=-5).texts == first
    assert ask(temperature=1.5, seed=2**64 - 6).texts != first


@drives("stop", "include_stop_str_in_output")
def a_stop_string_ends_the_text(ask, tokenizer):
    (text,) = ask().texts
    stop = text[3:5]
    end = text.index(stop)
    for wanted in (stop, ["never seen", stop]):
        answer = ask(stop=wanted)
        assert answer.texts == [text[:end]]
        assert (answer.reasons, answer.stop_reasons) == (["stop"], [stop])
    assert ask(stop=stop, include_stop_str_in_output=True).texts == [text[: end + len(stop)]]
    assert ask(stop=None).texts == ask(stop=[]).texts == [text]


@drives("stop_token_ids")
def a_stop_token_ends_it(ask, tokenizer):
    (ids,) = ask(return_token_ids=True).token_ids
    answer = ask(stop_token_ids=[ids[3]], return_token_ids=True)
    assert answer.token_ids == [ids[: ids.index(ids[3]) + 1]]
    assert (answer.reasons, answer.stop_reasons) == (["stop"], [ids[3]])


@drives("logit_bias", "skip_special_tokens")
def a_bias_makes_a_token_certain(ask, tokenizer):
    assert ask(logit_bias=ONLY_START).texts == [""]
    assert ask(logit_bias=ONLY_START, skip_special_tokens=False).texts == ["<|im_start|>" * 8]


@drives("ignore_eos", "min_tokens")
def the_end_comes_when_it_may(ask, tokenizer):
    ended = ask(logit_bias=ONLY_END)
    assert (ended.reasons, ended.usage.completion_tokens) == (["stop"], 1)
    later = ask(logit_bias=ONLY_END, min_tokens=5)
    assert later.reasons == ["stop"]
    assert 5 <= later.usage.completion_tokens <= 6
    endless = ask(logit_bias=ONLY_END, ignore_eos=True)
    assert (endless.reasons, endless.usage.completion_tokens) == (["length"], 8)


@drives("max_tokens")
def an_answer_has_a_longest_length(ask, tokenizer):
    answer = ask(max_tokens=3)
    assert (answer.reasons, answer.usage.completion_tokens) == (["length"], 3)


@drives("max_completion_tokens", apis=[CHAT])
def the_length_has_a_newer_name(ask, tokenizer):
    answer = ask(max_tokens=None, max_completion_tokens=3)
    assert (answer.reasons, answer.usage.completion_tokens) == (["length"], 3)


@drives("bad_words")
def a_bad_word_does_not_come(ask, tokenizer):
    (text,) = ask().texts
    word = text.split()[0]
    assert word not in ask(bad_words=[word]).texts[0]


@drives("allowed_token_ids", "return_token_ids")
def only_what_is_allowed_comes(ask, tokenizer):
    allowed = tokenizer.encode(" os sys")
    wish = {"allowed_token_ids": allowed, "return_token_ids": True, "ignore_eos": True, "n": 2}
    answer = ask(**wish, temperature=1.0)
    for ids, text, prompt in zip(
        answer.token_ids, answer.texts, answer.prompt_token_ids, strict=True
    ):
        assert len(ids) == 8
        assert set(ids) <= set(allowed)
        assert tokenizer.decode(ids) == text
        assert len(prompt) == answer.usage.prompt_tokens
    assert ask().token_ids == [[]]


@drives("prompt_logprobs", modes=WHOLE)
def the_prompt_has_logprobs_of_its_own(ask, tokenizer):
    answer = ask(prompt_logprobs=1, return_token_ids=True)
    holder = answer.whole.choices[0] if ask.api == COMPLETIONS else answer.whole
    first, *others = holder.prompt_logprobs
    ids = answer.prompt_token_ids[0]
    assert (first, len(others)) == (None, len(ids) - 1)
    for token_id, found in zip(ids[1:], others, strict=True):
        assert found[str(token_id)]["logprob"] <= 0
        assert min(entry["rank"] for entry in found.values()) == 1


@drives("logprob_token_ids")
def certain_tokens_have_logprobs(ask, tokenizer):
    listed = [300, 5, 42]
    asked = {"logprobs": 1} if ask.api == COMPLETIONS else {"logprobs": True, "top_logprobs": 2}
    answer = ask(**asked, logprob_token_ids=listed, return_tokens_as_token_ids=True)
    names = {f"token_id:{token_id}" for token_id in listed}
    ours = [(token, logprob) for token, logprob, _ in answer.logprobs[0]]
    plain = ask(**asked, return_tokens_as_token_ids=True).logprobs[0]
    assert ours == [(token, logprob) for token, logprob, _ in plain]
    for token, logprob, top in answer.logprobs[0]:
        assert set(top) == names | {token} and max(top.values()) <= logprob
    for wish, param in (
        ({"logprob_token_ids": listed}, "logprob_token_ids"),
        (asked | {"logprob_token_ids": []}, "logprob_token_ids"),
        (asked | {"logprob_token_ids": [1] * 129}, "logprob_token_ids"),
        (asked | {"logprob_token_ids": [10**6]}, "logprob_token_ids"),
    ):
        with pytest.raises(openai.BadRequestError, match="logprob_token_ids") as caught:
            ask(**wish)
        assert caught.value.param == param


@drives("truncate_prompt_tokens", "truncation_side")
def a_long_prompt_is_cut(ask, tokenizer):
    asked = {"return_token_ids": True, "max_tokens": 2}
    field = "prompt" if ask.api == COMPLETIONS else "messages"
    text = "import os\n" * 3000  # more characters than the tokens of any prompt have, too
    long = {field: text if ask.api == COMPLETIONS else [{"role": "user", "content": text}]}
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        ask(**long, **asked)
    whole = ask(**asked).prompt_token_ids[0]
    for side, kept in ((None, whole[-2:]), ("left", whole[-2:]), ("right", whole[:2])):
        cut = ask(**asked, truncate_prompt_tokens=2, truncation_side=side)
        assert (cut.prompt_token_ids[0], cut.usage.prompt_tokens) == (kept, 2)
    cut = ask(**long | {"max_tokens": None}, truncate_prompt_tokens=-1)
    assert (cut.usage.prompt_tokens, cut.usage.completion_tokens) == (1023, 1)
    if ask.api == COMPLETIONS:
        assert ask(prompt=kept, max_tokens=2).texts == (
            ask(max_tokens=2, truncate_prompt_tokens=2, truncation_side="right").texts
        )
        scored = {"echo": True, "logprobs": 0, "max_tokens": 0}
        echoed = ask(prompt=[7] * 5000, truncate_prompt_tokens=4, **scored)
        assert echoed.texts == [tokenizer.decode([7] * 4)] and len(echoed.logprobs[0]) == 4
    for limit in (0, -2, 1025):
        with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens") as caught:
            ask(truncate_prompt_tokens=limit)
        assert caught.value.param == "truncate_prompt_tokens"


@drives("logprobs", apis=[COMPLETIONS])
def a_completion_has_logprobs(ask, tokenizer):
    answer = ask(logprobs=2)
    assert "".join(token for token, _, _ in answer.logprobs[0]) == answer.texts[0]
    for token, logprob, top in answer.logprobs[0]:
        assert len(top) == 2
        assert top[token] == logprob == max(top.values())  # greedy
    assert ask().logprobs == [[]]


@drives("logprobs", "top_logprobs", apis=[CHAT])
def a_chat_has_logprobs(ask, tokenizer):
    answer = ask(logprobs=True, top_logprobs=3)
    assert "".join(token for token, _, _ in answer.logprobs[0]) == answer.texts[0]
    for token, logprob, top in answer.logprobs[0]:
        assert len(top) == 3
        assert top[token] == logprob == max(top.values())
    alone = ask(logprobs=True, top_logprobs=None)
    assert [top for _, _, top in alone.logprobs[0]] == [{}] * len(answer.logprobs[0])
    assert ask(logprobs=False, top_logprobs=None).logprobs == [[]]


@drives("echo", apis=[COMPLETIONS])
def an_echo_may_come_alone(ask, tokenizer):
    assert ask(echo=True).texts == [PROMPT + ask().texts[0]]
    scored = ask(echo=True, max_tokens=0, logprobs=1, prompt=[PROMPT, "def f("])
    assert scored.texts == [PROMPT, "def f("]
    assert scored.reasons == ["length", "length"]
    assert (scored.usage.completion_tokens, scored.usage.prompt_tokens) == (
        0,
        len(tokenizer.encode(PROMPT)) + len(tokenizer.encode("def f(")),
    )
    assert ["".join(token for token, _, _ in each) for each in scored.logprobs] == scored.texts
    longer = ask(echo=True, max_tokens=1, logprobs=1)
    assert scored.logprobs[0] == longer.logprobs[0][:-1]


@drives("add_special_tokens")
def special_tokens_of_the_tokenizer_are_a_choice(ask, tokenizer):
    """The embedded model's tokenizer adds none, so nothing may change."""
    assert ask(add_special_tokens=False).texts == ask(add_special_tokens=True).texts == ask().texts
    assert ask(add_special_tokens=False).usage.prompt_tokens == ask().usage.prompt_tokens


TEMPLATE_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")


@drives(*TEMPLATE_FIELDS, "echo", apis=[CHAT])
def the_template_has_options(ask, tokenizer):
    given = ({}, {"add_generation_prompt": False}, {"continue_final_message": True})
    counts = [ask(**options).usage.prompt_tokens for options in given]
    assert counts == sorted(set(counts), reverse=True)
    messages = [*QUESTION, {"role": "assistant", "content": "It"}]
    said = {"messages": messages, "continue_final_message": True}
    assert ask(**said, echo=True).texts == [f"It{ask(**said).texts[0]}"]
    assert ask(chat_template_kwargs={"mode": "plain"}).texts == ask().texts
    with pytest.raises(openai.BadRequestError, match="which is a separate option") as caught:
        ask(chat_template_kwargs={"messages": []})
    assert caught.value.param == "chat_template_kwargs"


@drives("mm_processor_kwargs", apis=[CHAT])
def settings_of_images_are_refused_without_an_encoder(ask, tokenizer):
    assert ask(mm_processor_kwargs={}).texts == ask().texts
    with pytest.raises(openai.BadRequestError, match="only text is taken here") as caught:
        ask(mm_processor_kwargs={"fps": 1})
    assert caught.value.param == "mm_processor_kwargs"


@drives("priority", "user")
def who_asks_changes_no_answer(ask, tokenizer):
    assert ask(priority=0, user="ada").texts == ask().texts
    for priority, why in ((2**31, "priority"), (-3, "scheduling policy reads no priorities")):
        with pytest.raises(openai.BadRequestError, match=why) as caught:
            ask(priority=priority)
        assert caught.value.param == "priority"
    with pytest.raises(openai.BadRequestError, match="user"):
        ask(user=3)


@drives("deadline_s")
def a_deadline_ends_a_call(ask, tokenizer):
    assert ask(deadline_s=60).texts == ask().texts
    with pytest.raises(openai.APIStatusError, match="deadline") as caught:
        ask(deadline_s=1e-6)
    assert caught.value.status_code == 408


@drives("speculation_history")
def an_answer_that_is_kept_for_no_drafts_is_the_same(ask, tokenizer):
    assert ask(speculation_history=False).texts == ask().texts
    with pytest.raises(openai.BadRequestError, match="speculation_history"):
        ask(speculation_history="sometimes")


@drives("cache_salt")
def a_salt_parts_the_cache(ask, tokenizer):
    text = "import os\n" * 12
    wish = (
        {"prompt": text}
        if ask.api == COMPLETIONS
        else {"messages": [{"role": "user", "content": text}]}
    )
    salt = uuid.uuid4().hex
    cached = [
        ask(**wish, cache_salt=each).usage.prompt_tokens_details.cached_tokens
        for each in (salt, salt, salt + "x")
    ]
    assert cached[0] == cached[2] == 0 < cached[1]


@drives("use_beam_search", "length_penalty", modes=WHOLE)
def a_beam_search_has_n_results(ask, tokenizer):
    best, second = ask(use_beam_search=True, n=2, length_penalty=0.5).texts
    assert best != second
    with pytest.raises(openai.BadRequestError, match="length_penalty is 9"):
        ask(use_beam_search=True, length_penalty=9)


@drives("prediction", apis=[CHAT])
def an_expected_answer_is_counted(ask, tokenizer):
    """As a text or in parts, right and wrong: the tokens stay the same."""
    wish = {"max_tokens": 24, "n": 2, "temperature": 1.0, "seed": 3, "logprobs": True}
    plain = ask(**wish)
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens is None
    text = plain.texts[0]
    tokens = tokenizer.encode_continuation(text)
    for content in (text, [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]):
        answer = ask(**wish, prediction={"type": "content", "content": content})
        assert (answer.texts, answer.logprobs) == (plain.texts, plain.logprobs)
        assert answer.usage.completion_tokens == plain.usage.completion_tokens
        details = answer.usage.completion_tokens_details
        num_accepted = details.accepted_prediction_tokens
        assert num_accepted >= len(tokens) > 5, "all of the first choice, at least"
        assert num_accepted + details.rejected_prediction_tokens == 2 * len(tokens)
    wrong = ask(**wish, prediction={"type": "content", "content": "Zebras! Zebras!"})
    assert wrong.texts == plain.texts
    assert wrong.usage.completion_tokens_details.rejected_prediction_tokens > 5
    for prediction, message in (
        ({"type": "content", "content": "x" * 100_000}, "the prediction has 100000 characters"),
        ({"type": "content", "content": "a b " * 2000}, "the prediction has .* max_model_len"),
        ({"type": "content", "content": [{"type": "image"}]}, "prediction"),
        ({"type": "text", "content": "x"}, "prediction"),
        ({"type": "content", "content": 7}, "prediction"),
    ):
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            ask(prediction=prediction)
        assert caught.value.param.partition(".")[0] == "prediction"
    if not ask.streams:  # beams come whole
        with pytest.raises(openai.BadRequestError, match=r"prediction .* use_beam_search"):
            ask(use_beam_search=True, n=2, prediction={"type": "content", "content": "x"})


@drives("stream", "stream_options", modes=STREAMED)
def a_stream_tells_its_usage_as_asked(ask, tokenizer):
    """Nothing, at the end, all the time, or both."""
    silent = ask(stream_options=None)
    assert all(chunk.usage is None for chunk in silent.chunks)
    last = ask(stream_options={"include_usage": True}).chunks
    assert [chunk.usage is None for chunk in last] == [True] * (len(last) - 1) + [False]
    assert (last[-1].choices, last[-1].usage.completion_tokens) == ([], 8)
    always = ask(stream_options={"continuous_usage_stats": True}).chunks
    counts = [chunk.usage.completion_tokens for chunk in always]
    assert counts == sorted(counts)
    assert counts[-1] == 8
    assert all(chunk.choices for chunk in always)
    both = ask(stream_options={"continuous_usage_stats": True, "include_usage": True}).chunks
    assert both[-1].choices == []
    assert both[-1].usage == always[-1].usage


@pytest.fixture(scope="module")
def clients(server):
    clients = Clients(server.url)
    yield clients
    clients.close()


READING = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
FUNCTION = {"name": "report", "parameters": READING}


@drives("response_format", "structured_outputs", "guided_json", "guided_whitespace_pattern")
def an_answer_has_the_form_of_a_schema(ask, tokenizer):
    named = {"type": "json_schema", "json_schema": {"name": "reading", "schema": READING}}
    for wish in (
        {"response_format": named},
        {"structured_outputs": {"json": READING}},
        {"guided_json": READING, "guided_whitespace_pattern": " ?"},
    ):
        answer = ask(**wish, max_tokens=64)
        assert json.loads(answer.texts[0])["unit"] in "CF" and answer.reasons == ["stop"]
    with pytest.raises(openai.BadRequestError, match="both set") as caught:
        ask(response_format=named, structured_outputs={"json": READING})
    assert caught.value.param == "structured_outputs"


@drives("guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend")
def the_older_names_of_a_form_are_obeyed(ask, tokenizer):
    for wish in (
        {"guided_regex": "[xy]z"},
        {"guided_choice": ["xz", "yz"], "guided_decoding_backend": "auto"},
        {"guided_grammar": 'start: "xz" | "yz"'},
    ):
        assert ask(**wish).texts[0] in ("xz", "yz")


@drives("random_seed")
def mistrals_seed_is_a_seed(ask, tokenizer):
    assert ask(temperature=1.5, random_seed=5).texts == ask(temperature=1.5, seed=5).texts


@drives("return_tokens_as_token_ids")
def tokens_are_named_by_their_ids(ask, tokenizer):
    wish = {"logprobs": 1} if ask.api == COMPLETIONS else {"logprobs": True, "top_logprobs": 1}
    answer = ask(**wish, return_tokens_as_token_ids=True, return_token_ids=True)
    names = [token for token, _, _ in answer.logprobs[0]]
    assert names == [f"token_id:{token_id}" for token_id in answer.token_ids[0]]


@drives("tools", "tool_choice", "parallel_tool_calls", apis=[CHAT], modes=WHOLE)
def a_call_can_be_forced(ask, tokenizer):
    wish = {"tools": [{"type": "function", "function": FUNCTION}], "max_tokens": 100}
    answer = ask(**wish, tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.whole.choices[0].message.tool_calls
    assert call.function.name == "report" and answer.reasons == ["tool_calls"]
    assert json.loads(call.function.arguments)["unit"] in "CF"


@drives("reasoning", "reasoning_effort", "enable_thinking", "include_reasoning", apis=[CHAT])
def a_model_that_does_not_think_answers_all_the_same(ask, tokenizer):
    plain = ask().texts
    assert ask(reasoning_effort="low", include_reasoning=False).texts == plain
    assert ask(reasoning={"effort": "high"}, enable_thinking=False).texts == plain
    with pytest.raises(openai.BadRequestError, match="enable_thinking and reasoning"):
        ask(reasoning={"enabled": True}, enable_thinking=False)
    with pytest.raises(openai.BadRequestError, match="reasoning_effort") as caught:
        ask(reasoning_effort="enormous")
    assert caught.value.param == "reasoning_effort"


@drives("thinking_token_budget", apis=[CHAT])
def thinking_has_a_bound_of_tokens(ask, tokenizer):
    with pytest.raises(openai.BadRequestError, match="thinking_token_budget") as caught:
        ask(thinking_token_budget=-1)
    assert caught.value.param == "thinking_token_budget"


WAYS = [
    pytest.param(function, api, mode, id=f"{function.__name__}-{api}-{mode}")
    for function, _, apis, modes in CASES
    for api in apis
    for mode in modes
]


@pytest.mark.parametrize(("function", "api", "mode"), WAYS)
def test_a_field_has_its_effect(clients, http, tokenizer, function, api, mode):
    function(Asker(clients, api, mode), tokenizer)


@pytest.mark.parametrize("api", MODELS)
def test_every_field_is_driven(api):
    driven = {name for _, names, apis, _ in CASES if api in apis for name in names}
    assert driven == set(MODELS[api].model_fields)


REFUSED = [(api, name) for api, model in MODELS.items() for name in sorted(model.not_supported)]


@pytest.mark.parametrize(("api", "name"), REFUSED)
def test_unsupported_fields_are_refused_by_name(clients, api, name):
    with pytest.raises(
        openai.BadRequestError, match=f"{name} is (not supported yet|the old form of)"
    ) as caught:
        Asker(clients, api, "sync")(extra_body={name: {"type": "wanted"}})
    assert caught.value.param == name
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize("api", MODELS)
def test_fields_in_an_extra_body_of_the_json_count_as_well(clients, api):
    """As a client sends it that writes `extra_body` out: OpenAI's own puts its fields beside it."""
    ask = Asker(clients, api, "sync")
    inner = {"top_k": 1, "temperature": 5.0, "seed": 1}
    assert ask(temperature=None, extra_body=inner).texts == ask().texts
    with pytest.raises(openai.BadRequestError, match="give it once") as caught:
        ask(extra_body={"max_tokens": 3})
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize("api", MODELS)
def test_answers_name_what_their_numbers_depend_on(clients, api):
    answers = [Asker(clients, api, mode)() for mode in ("sync", "sync-stream")]
    (chunks,) = {chunk.system_fingerprint for chunk in answers[1].chunks}
    assert answers[0].whole.system_fingerprint == chunks
