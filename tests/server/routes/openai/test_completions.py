"""/v1/completions through OpenAI's own client, on the embedded model."""

import asyncio

import openai
import pytest
from tests.server.generation import test_http_generation as faked
from tests.server.working import StepClock

from quire.core.request import FinishReason, SequenceOutput
from quire.core.sampling_params import SamplingParams
from quire.core.step import TokenLogprobs
from quire.engine_client.logprob_entries import CHUNK_TOKENS
from quire.server.generation.answer import AnsweredCall
from quire.server.generation.chat_prompt import ChatPrompt
from quire.server.http.errors import openai_error
from quire.server.http.long_work import WorkPieces
from quire.server.routes.openai.chat import _ChatAnswer
from quire.server.routes.openai.chat_body import ChatCompletionRequest
from quire.server.routes.openai.completions import CompletionRequest, _CompletionAnswer
from quire.server.service import Service
from quire.text.parsers.dialect_choice import find_dialect

PROMPT = "import os\n"
GREEDY = {"model": "embedded", "temperature": 0}


def test_a_completion_has_openais_shape(client):
    answer = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=5)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "embedded"
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert choice.text


def test_sixteen_tokens_are_the_default(client):
    answer = client.completions.create(**GREEDY, prompt=PROMPT, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


def test_usage_counts_what_came_in_and_went_out(client, tokenizer):
    num_prompt = len(tokenizer.encode(PROMPT))
    answer = client.completions.create(**GREEDY, prompt=[PROMPT, PROMPT + "#"], max_tokens=4, n=2)
    usage = answer.usage
    assert usage.prompt_tokens == num_prompt + len(tokenizer.encode(PROMPT + "#"))
    assert usage.completion_tokens == 16
    assert usage.total_tokens == usage.prompt_tokens + 16


def test_usage_tells_what_the_prefix_cache_saved(client):
    prompt = list(range(100, 180))
    first = client.completions.create(**GREEDY, prompt=prompt, max_tokens=1)
    again = client.completions.create(**GREEDY, prompt=prompt, max_tokens=1)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens == 79  # the last one is to be computed
    assert again.choices[0].text == first.choices[0].text


def test_text_and_its_token_ids_are_the_same_prompt(client, tokenizer):
    ids = tokenizer.encode(PROMPT)
    texts = {
        client.completions.create(**GREEDY, prompt=prompt, max_tokens=12).choices[0].text
        for prompt in (PROMPT, ids, [PROMPT], [ids])
    }
    assert len(texts) == 1


def test_many_prompts_with_n_choices_each_come_in_order(client):
    prompts = [PROMPT, "def f(", "class "]
    alone = [
        client.completions.create(**GREEDY, prompt=prompt, max_tokens=8).choices[0].text
        for prompt in prompts
    ]
    answer = client.completions.create(**GREEDY, prompt=prompts, max_tokens=8, n=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [text for text in alone for _ in (0, 1)]


def test_the_stream_joined_is_the_whole_answer(client):
    wish = {
        **GREEDY,
        "prompt": [PROMPT, "def f("],
        "max_tokens": 20,
        "n": 2,
        "temperature": 0.8,
        "seed": 7,
        "logprobs": 2,
        "echo": True,
    }
    whole = client.completions.create(**wish)
    texts, tokens, reasons = [""] * 4, [[] for _ in range(4)], [None] * 4
    for chunk in client.completions.create(**wish, stream=True):
        assert chunk.id.startswith("cmpl-")
        assert chunk.usage is None
        for choice in chunk.choices:
            assert reasons[choice.index] is None
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]


def test_a_stream_can_end_with_the_usage(client):
    chunks = list(
        client.completions.create(
            **GREEDY,
            prompt=PROMPT,
            max_tokens=6,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 6
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(client, server, stream):
    free = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=40).choices[0].text
    stop = free[len(free) // 2 :][:3]
    wish = {**GREEDY, "prompt": PROMPT, "max_tokens": 900, "stop": ["never seen", stop]}
    if stream:
        chunks = [chunk.choices[0] for chunk in client.completions.create(**wish, stream=True)]
        text, last = "".join(chunk.text for chunk in chunks), chunks[-1]
    else:
        last = client.completions.create(**wish).choices[0]
        text = last.text
    assert text == free[: free.index(stop)]
    assert last.finish_reason == "stop"
    assert last.stop_reason == stop


def test_a_stop_string_is_kept_where_that_is_asked_for(client):
    free = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=40).choices[0].text
    stop = free[5:8]
    answer = client.completions.create(
        **GREEDY,
        prompt=PROMPT,
        max_tokens=40,
        stop=stop,
        extra_body={"include_stop_str_in_output": True},
    )
    assert answer.choices[0].text == free[: free.index(stop) + 3]


def test_a_stop_token_ends_it_and_is_named(client, tokenizer):
    free = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=20).choices[0].text
    token = tokenizer.encode(free)[3]
    answer = client.completions.create(
        **GREEDY, prompt=PROMPT, max_tokens=20, extra_body={"stop_token_ids": [token]}
    )
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", token)
    assert free.startswith(choice.text)


def test_logprobs_have_openais_shape_and_agree_with_the_text(client):
    answer = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=10, logprobs=3)
    choice = answer.choices[0]
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 10
    for token, logprob, top, offset in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset, strict=True
    ):
        assert choice.text[offset:].startswith(token)
        assert len(top) == 3
        assert top[token] == logprob == max(top.values())  # greedy: the likeliest one


def test_logprobs_zero_reports_the_tokens_alone(client):
    answer = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=3, logprobs=0)
    assert [len(top) for top in answer.choices[0].logprobs.top_logprobs] == [1, 1, 1]


def test_echo_prepends_the_prompt_and_its_logprobs(client, tokenizer):
    ids = tokenizer.encode(PROMPT)
    answer = client.completions.create(**GREEDY, prompt=ids, max_tokens=4, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text.startswith(PROMPT)
    found = choice.logprobs
    assert len(found.tokens) == len(ids) + 4
    assert "".join(found.tokens) == choice.text
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    assert all(logprob <= 0 for logprob in found.token_logprobs[1:])
    assert found.text_offset == [len("".join(found.tokens[:at])) for at in range(len(found.tokens))]


def test_echo_of_a_single_token_has_no_logprob_at_all(client, tokenizer):
    ids = tokenizer.encode("import")
    answer = client.completions.create(**GREEDY, prompt=ids, max_tokens=1, echo=True, logprobs=1)
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    assert len(answer.choices[0].logprobs.tokens) == 2


def test_prompt_logprobs_are_reported_by_token_id(client, tokenizer):
    ids = tokenizer.encode(PROMPT)
    answer = client.completions.create(
        **GREEDY, prompt=PROMPT, max_tokens=2, extra_body={"prompt_logprobs": 2}
    )
    first, *others = answer.choices[0].prompt_logprobs
    assert first is None
    assert len(others) == len(ids) - 1
    for token_id, found in zip(ids[1:], others, strict=True):
        assert {"logprob", "rank", "decoded_token"} == found[str(token_id)].keys()
        assert sorted(entry["rank"] for entry in found.values())[:2] == [1, 2]


def test_a_seeded_request_is_the_same_alone_and_in_a_crowd(server, client):
    wish = {"model": "embedded", "prompt": "def ", "max_tokens": 24, "temperature": 1.0}
    alone = [client.completions.create(**wish, seed=seed).choices[0].text for seed in range(6)]
    assert len(set(alone)) == 6

    async def crowd():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as crowded:
            calls = (crowded.completions.create(**wish, seed=seed) for seed in range(6))
            return [answer.choices[0].text for answer in await asyncio.gather(*calls)]

    assert asyncio.run(crowd()) == alone


def test_without_a_seed_two_calls_differ(client):
    wish = {"model": "embedded", "prompt": "def ", "max_tokens": 24, "temperature": 1.0}
    texts = {client.completions.create(**wish).choices[0].text for _ in range(4)}
    assert len(texts) > 1


def test_the_sampling_fields_reach_the_engine(client, tokenizer):
    allowed = tokenizer.encode(" os sys")
    answer = client.completions.create(
        model="embedded",
        prompt=PROMPT,
        max_tokens=12,
        extra_body={"allowed_token_ids": allowed, "ignore_eos": True, "min_tokens": 12},
    )
    assert set(tokenizer.encode(answer.choices[0].text)) <= set(allowed)
    biased = client.completions.create(
        **GREEDY, prompt=PROMPT, max_tokens=3, logit_bias={str(allowed[0]): 100}
    )
    assert biased.choices[0].text == tokenizer.decode(allowed[:1] * 3)
    plain = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=8).choices[0].text
    word = plain.split()[0]
    without = client.completions.create(
        **GREEDY, prompt=PROMPT, max_tokens=8, extra_body={"bad_words": [word]}
    )
    assert word not in without.choices[0].text


def test_a_long_prompt_is_tokenized_beside_the_loop(client):
    for num_words, words in ((2000, "the prompt has .* tokens"), (200_000, "1000000 characters")):
        with pytest.raises(openai.BadRequestError, match=rf"{words}.*max_model_len .*1024") as bad:
            client.completions.create(model="embedded", prompt="word " * num_words)
        assert (bad.value.code, bad.value.param) == ("context_length_exceeded", "prompt")


def test_more_choices_than_rows_wait_their_turn(client):
    answer = client.completions.create(
        model="embedded", prompt=PROMPT, max_tokens=1, n=50, temperature=1.0
    )
    assert [choice.index for choice in answer.choices] == list(range(50))


SEARCH = {"model": "embedded", "prompt": PROMPT, "max_tokens": 9, "n": 3}
BEAMS = {"use_beam_search": True}


def test_a_beam_search_gives_its_results_as_choices(client):
    answer = client.completions.create(**SEARCH, extra_body=BEAMS)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) == 3
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 3
    assert answer.usage.completion_tokens == 27
    again = client.completions.create(**SEARCH, echo=True, extra_body=BEAMS)
    assert [choice.text for choice in again.choices] == [
        PROMPT + choice.text for choice in answer.choices
    ]


def test_every_prompt_gets_a_beam_search_of_its_own(client):
    wish = SEARCH | {"prompt": [PROMPT, "def f("]}
    answer = client.completions.create(**wish, extra_body=BEAMS)
    alone = client.completions.create(**SEARCH, extra_body=BEAMS)
    assert [choice.index for choice in answer.choices] == list(range(6))
    texts = [choice.text for choice in answer.choices]
    assert texts[:3] == [choice.text for choice in alone.choices]
    assert len(set(texts[3:])) == 3


def test_a_single_beam_is_greedy(client):
    search = client.completions.create(**SEARCH | {"n": 1}, extra_body=BEAMS)
    greedy = client.completions.create(**SEARCH | {"n": 1, "temperature": 0})
    assert search.choices[0].text == greedy.choices[0].text


@pytest.mark.parametrize(
    ("options", "param"),
    [({"stream": True}, "stream"), ({"top_p": 0.5}, "top_p"), ({"n": 100}, "n")],
)
def test_options_not_for_beam_searches_are_refused_by_name(client, options, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**SEARCH | options, extra_body=BEAMS)
    assert caught.value.body["param"] == param


def test_more_beams_than_rows_are_refused(client):
    with pytest.raises(openai.UnprocessableEntityError, match="max_num_seqs"):
        client.completions.create(**SEARCH | {"n": 17}, extra_body=BEAMS)


def test_a_stream_tells_the_prompts_token_ids_once_for_each_choice(client, tokenizer):
    wish = {"prompt": [PROMPT, "def f("], "n": 2, "max_tokens": 6}
    firsts, ids = {}, {}
    for chunk in client.completions.create(
        **GREEDY, **wish, stream=True, extra_body={"return_token_ids": True}
    ):
        for choice in chunk.choices:
            found = getattr(choice, "prompt_token_ids", None)
            assert (found is None) == (choice.index in firsts)
            firsts.setdefault(choice.index, found)
            ids.setdefault(choice.index, []).extend(choice.token_ids)
    prompts = [tokenizer.encode(PROMPT)] * 2 + [tokenizer.encode("def f(")] * 2
    assert [firsts[index] for index in range(4)] == prompts
    whole = client.completions.create(**GREEDY, **wish, extra_body={"return_token_ids": True})
    assert [ids[index] for index in range(4)] == [choice.token_ids for choice in whole.choices]


def test_a_scored_prompt_is_scored_as_in_front_of_an_answer(client, tokenizer):
    prompts = [tokenizer.encode(text) for text in (PROMPT * 3, "def f(x):")]
    wish = {"prompt": prompts, "logprobs": 5, "echo": True}
    scored = client.completions.create(**GREEDY, **wish, max_tokens=0)
    longer = client.completions.create(**GREEDY, **wish, max_tokens=2)
    assert [choice.text for choice in scored.choices] == [PROMPT * 3, "def f(x):"]
    assert scored.usage.completion_tokens == 0
    for alone, before in zip(scored.choices, longer.choices, strict=True):
        assert alone.finish_reason == "length"
        assert alone.logprobs.token_logprobs == before.logprobs.token_logprobs[:-2]
        assert alone.logprobs.top_logprobs == before.logprobs.top_logprobs[:-2]
    streamed = list(client.completions.create(**GREEDY, **wish, max_tokens=0, stream=True))
    assert sorted(chunk.choices[0].text for chunk in streamed) == sorted(
        choice.text for choice in scored.choices
    )


def test_an_echo_is_the_text_that_was_sent(client):
    """With its special tokens, which an answer leaves out."""
    text = "<|im_start|>user\nhi"
    answer = client.completions.create(
        **GREEDY, prompt=text, max_tokens=0, echo=True, extra_body={"add_special_tokens": False}
    )
    assert answer.choices[0].text == text


def test_a_long_answer_comes_in_chunks_and_is_whole(client, http):
    """Over a real connection: status and headers first, then what is made while it is sent."""
    fields = {"prompt": ["print", "import"], "n": 4, "max_tokens": 200, "logprobs": 20}
    fields |= {"temperature": 0, "ignore_eos": True, "prompt_logprobs": 1}
    raw = http.post("/v1/completions", json=fields)
    assert raw.headers["transfer-encoding"] == "chunked" and "content-length" not in raw.headers
    choices = raw.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(8))
    for choice in choices:
        found = choice["logprobs"]
        assert [len(values) for values in found.values()] == [200] * 4
        assert {len(top) for top in found["top_logprobs"]} <= {20, 21}
        assert "".join(found["tokens"]) == choice["text"]
        assert choice["prompt_logprobs"][0] is None
    assert raw.json()["usage"]["completion_tokens"] == 1600
    more = {name: fields.pop(name) for name in ("ignore_eos", "prompt_logprobs")}
    answer = client.completions.create(model="embedded", **fields, extra_body=more)
    assert [choice.text for choice in answer.choices] == [choice["text"] for choice in choices]


CHAT = {"messages": [{"role": "user", "content": "print"}]}
NUM_TOKENS = 200


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
@pytest.mark.parametrize(
    ("make_call", "make_body", "wish"),
    [
        (_CompletionAnswer, CompletionRequest, {"prompt": "print", "logprobs": 2}),
        (_CompletionAnswer, CompletionRequest, {"prompt": "a", "logprobs": 2, "echo": True}),
        (_ChatAnswer, ChatCompletionRequest, CHAT | {"logprobs": True, "top_logprobs": 2}),
    ],
)
def test_a_long_answer_is_made_in_pieces_while_others_go_on(
    tokenizer, make_call, make_body, wish, fields
):
    """However much of it there is at once: so it is for a client that is slow."""
    body = make_body.model_validate(wish | fields | {"n": 5})
    turns, sent = [], []

    async def play():
        engine = faked.FakeEngine()
        pieces = WorkPieces(StepClock())
        service = Service(engine, tokenizer, None, "model", work=pieces)
        generation = faked.make(service, tokenizer, params=SamplingParams(n=5, logprobs=2))
        prompt = ChatPrompt(inputs=[], dialect=find_dialect(None))
        call = make_call(AnsweredCall(service, body, prompt, generation, openai_error))
        num_turns = 0

        async def send(message):
            turns.append(num_turns)
            sent.append(message)

        async def receive():
            await asyncio.Event().wait()

        async def respond():
            response = call.stream() if body.stream else await call.whole(receive)
            await response({"type": "http"}, receive, send)

        answer = asyncio.ensure_future(respond())
        while engine.stream is None:
            await asyncio.sleep(0)
        entry = TokenLogprobs(5, -1.0, 2, (6, 5), (-0.5, -1.0))
        for branch in range(5):
            output = SequenceOutput(
                "c-0",
                branch,
                (5,) * NUM_TOKENS,
                0,
                FinishReason.LENGTH,
                logprobs=(entry,) * NUM_TOKENS,
                prompt_logprobs=(entry,) if branch == 0 else None,
            )
            engine.stream.push(output)
        while not answer.done():
            num_turns += 1
            await asyncio.sleep(0)
        await answer

    asyncio.run(play())
    parts = [message["body"] for message in sent[1:]]
    assert b"".join(parts).count(b'"logprob":' if make_call is _ChatAnswer else b"-0.5") >= 1000
    assert max(turns) >= 5 * NUM_TOKENS // CHUNK_TOKENS // 5
