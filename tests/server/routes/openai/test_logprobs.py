"""Log-probabilities in OpenAI's two shapes, with characters cut across tokens."""

import json
import math
from functools import partial

import msgspec
import pytest

from quire.core.step import TokenLogprobs
from quire.engine_client.logprob_entries import CHUNK_TOKENS, LogprobEntries
from quire.server.routes.openai.completions import CompletionRequest
from quire.server.routes.openai.logprobs import (
    CompletionLogprobsWriter,
    chat_logprobs,
    chat_logprobs_json,
    completion_logprobs_json,
    id_name,
    prompt_logprobs_json,
    token_name,
)

TEXT = "naïve 😀 x"


def entries(token_ids):
    """Each token second-best after token 5."""
    return [TokenLogprobs(token, -2.0, 2, (5, token), (-0.5, -2.0)) for token in token_ids]


def writer(tokenizer, prompt=(), num_top=2, name=None, skip_special_tokens=True):
    name = name or partial(token_name, tokenizer)
    return CompletionLogprobsWriter(
        tokenizer, prompt, num_top=num_top, skip_special_tokens=skip_special_tokens, name=name
    )


def test_offsets_count_characters_however_tokens_cut_them(tokenizer):
    ids = tokenizer.encode(TEXT)
    written = writer(tokenizer).write(entries(ids))
    assert len(written.tokens) == len(written.text_offset) == len(ids)
    for at, (name, offset) in enumerate(zip(written.tokens, written.text_offset, strict=True)):
        whole = tokenizer.decode(ids[:at]).rstrip("\ufffd")
        assert offset == len(whole)
        if not name.startswith("bytes:"):
            assert TEXT[offset:].startswith(name)


def test_a_token_that_is_a_part_of_a_character_is_named_by_its_bytes(tokenizer):
    ids = tokenizer.encode("😀")
    assert len(ids) > 1
    written = writer(tokenizer).write(entries(ids))
    joined = b"".join(
        bytes.fromhex(name.removeprefix("bytes:").replace("\\x", "")) for name in written.tokens
    )
    assert joined.decode() == "😀"


def test_special_tokens_take_no_room_in_the_text(tokenizer):
    special = min(tokenizer.special_token_ids)
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    assert writer(tokenizer).write(entries([a, special, b])).text_offset == [0, 1, 1]


def test_the_token_itself_is_reported_beside_the_likeliest(tokenizer):
    ids = tokenizer.encode("a b")
    top_one = writer(tokenizer, num_top=1).write(entries(ids))
    assert [len(top) for top in top_one.top_logprobs] == [2] * len(ids)
    assert [next(iter(top)) for top in top_one.top_logprobs] == top_one.tokens
    none = writer(tokenizer, num_top=0).write(entries(ids))
    assert [list(top.values()) for top in none.top_logprobs] == [[-2.0]] * len(ids)


@pytest.mark.parametrize("are_listed", [True, False])
def test_chat_top_logprobs_include_the_sampled_token(tokenizer, are_listed):
    found = [
        TokenLogprobs(7, -0.3, 3, (8, 9), (-0.1, -0.2)),
        TokenLogprobs(8, -0.1, 1, (8,), (-0.1,)),
    ]
    first, second = chat_logprobs(tokenizer, found, str, are_listed=are_listed).content
    assert [top.token for top in first.top_logprobs] == ["7"] * are_listed + ["8", "9"]
    assert [top.token for top in second.top_logprobs] == ["8"]


def test_all_likeliest_tokens_are_reported_where_minus_one_is_asked_for(tokenizer):
    found = [TokenLogprobs(7, -0.1, 1, (7, 8, 9), (-0.1, -0.2, -0.3))]
    assert len(writer(tokenizer, num_top=-1).write(found).top_logprobs[0]) == 3
    for num_top, count in ((-1, 3), (2, 2), (0, 1)):
        parts = prompt_logprobs_json(tokenizer, LogprobEntries.of(found), num_top)
        assert [len(each or ()) for each in json.loads(b"".join(parts))] == [0, count]
    wish = CompletionRequest(prompt="a", prompt_logprobs=3, logprobs=-1, echo=True)
    assert wish.to_params().sampling.prompt_logprobs == -1


def test_an_echo_comes_first_and_the_rest_goes_on_behind_it(tokenizer):
    prompt, generated = tokenizer.encode("import os"), tokenizer.encode("\nx")
    echoed = [TokenLogprobs(token, -1.0, 3, (7, 8), (-0.1, -0.2)) for token in prompt[1:]]
    writer_ = writer(tokenizer, num_top=1)
    parts = (
        *writer_.write_echo(prompt, LogprobEntries.of(echoed), "import os", is_given=True),
        writer_.write(entries(generated)),
    )
    joined = json.loads(b"".join(completion_logprobs_json(parts)))
    tokens = joined["tokens"]
    assert "".join(tokens) == "import os\nx"
    assert joined["token_logprobs"] == [None, *[-1.0] * (len(prompt) - 1), *[-2.0] * len(generated)]
    assert joined["top_logprobs"][0] is None
    assert set(joined["top_logprobs"][1].values()) == {-0.1, -1.0}
    assert joined["text_offset"] == [len("".join(tokens[:at])) for at in range(len(tokens))]


@pytest.mark.parametrize("skips", [True, False])
def test_offsets_behind_special_tokens_of_an_echoed_text_are_those_in_it(tokenizer, skips):
    """The first token is the tokenizer's own, and stands in no text that a caller sends."""
    text = "<|im_start|>user\na<|im_end|>\n"
    prompt = [min(tokenizer.special_token_ids), *tokenizer.encode(text)]
    writer_ = writer(tokenizer, skip_special_tokens=skips)
    echoed = LogprobEntries.of(entries(prompt[1:]))
    parts = [*writer_.write_echo(prompt, echoed, text, is_given=True), writer_.write(entries([5]))]
    offsets = [at for part in parts for at in part.text_offset]
    texts = [tokenizer.token_text(token) for token in prompt[1:]]
    assert "".join(texts) == text
    ends = [len("".join(texts[:at])) for at in range(len(texts) + 1)]
    assert offsets == [0, *ends]


@pytest.mark.parametrize("skips", [True, False])
def test_offsets_in_an_echo_of_token_ids_are_those_of_their_own_text(tokenizer, skips):
    prompt = tokenizer.encode("<|im_start|>user\na<|im_end|>\n")
    text = tokenizer.decode(prompt, skip_special_tokens=skips)
    writer_ = writer(tokenizer, skip_special_tokens=skips)
    echoed = LogprobEntries.of(entries(prompt[1:]))
    parts = [*writer_.write_echo(prompt, echoed, text, is_given=False), writer_.write(entries([5]))]
    offsets = [at for part in parts for at in part.text_offset]
    decoded = [
        tokenizer.decode(prompt[:at], skip_special_tokens=skips) for at in range(len(prompt) + 1)
    ]
    assert offsets == [len(each) for each in decoded]


@pytest.mark.parametrize("num_tokens", [0, 1, CHUNK_TOKENS, 3 * CHUNK_TOKENS + 1])
def test_json_written_in_parts_equals_the_whole(tokenizer, num_tokens):
    ids = (tokenizer.encode(TEXT) * num_tokens)[:num_tokens]
    found = LogprobEntries.of(entries(ids))
    whole = msgspec.json.encode(chat_logprobs(tokenizer, found))
    assert b"".join(chat_logprobs_json(tokenizer, found)) == whole
    a, b = writer(tokenizer), writer(tokenizer)
    parts = [a.write(chunk) for chunk in found.chunks()]
    assert b"".join(completion_logprobs_json(parts)) == msgspec.json.encode(b.write(found))


def test_a_part_is_never_longer_than_a_chunk(tokenizer):
    """What is written between two pauses does not grow with the answer."""
    found = LogprobEntries.of(entries([5] * 10 * CHUNK_TOKENS))
    for parts in (
        chat_logprobs_json(tokenizer, found),
        prompt_logprobs_json(tokenizer, found, 2),
    ):
        lengths = [part.count(b'logprob":') for part in parts]
        assert sum(lengths) >= 10 * CHUNK_TOKENS and max(lengths) <= 3 * CHUNK_TOKENS
    num_pauses = 0
    for part in completion_logprobs_json(writer(tokenizer).write(c) for c in found.chunks()):
        num_pauses += not part
    assert num_pauses == 10


def test_minus_infinity_is_a_number_that_json_has(tokenizer):
    token = tokenizer.encode("a")[0]
    never = [TokenLogprobs(token, -math.inf, 9, (5,), (-math.inf,))]
    written = writer(tokenizer).write(never)
    assert written.token_logprobs == [-9999.0]
    assert set(written.top_logprobs[0].values()) == {-9999.0}
    chat = chat_logprobs(tokenizer, never).content[0]
    assert (chat.logprob, chat.top_logprobs[0].logprob) == (-9999.0, -9999.0)


def test_chat_logprobs_carry_the_bytes(tokenizer):
    ids = tokenizer.encode(TEXT)
    content = chat_logprobs(tokenizer, entries(ids)).content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == TEXT
    assert [len(entry.top_logprobs) for entry in content] == [2] * len(ids)


@pytest.mark.parametrize(("num_top", "ranks"), [(0, [3]), (1, [1, 3]), (2, [1, 2, 3])])
def test_prompt_logprobs_are_cut_to_what_was_asked(tokenizer, num_top, ranks):
    found = LogprobEntries.of([TokenLogprobs(9, -3.0, 3, (5, 6, 9), (-0.1, -0.2, -3.0))])
    first, second = json.loads(b"".join(prompt_logprobs_json(tokenizer, found, num_top)))
    assert first is None
    assert [entry["rank"] for entry in second.values()] == ranks
    name = tokenizer.token_text(9)
    assert second["9"] == {"logprob": -3.0, "rank": 3, "decoded_token": name}


def test_a_prompt_token_beyond_the_likeliest_has_its_own_rank(tokenizer):
    found = LogprobEntries.of([TokenLogprobs(9, -7.0, 44, (5, 6), (-0.1, -0.2))])
    _, second = json.loads(b"".join(prompt_logprobs_json(tokenizer, found, 2)))
    assert [entry["rank"] for entry in second.values()] == [1, 2, 44]


def test_tokens_may_be_called_by_their_ids(tokenizer):
    ids = tokenizer.encode(TEXT)
    written = writer(tokenizer, name=id_name).write(entries(ids))
    assert written.tokens == [f"token_id:{token_id}" for token_id in ids]
    assert all("token_id:5" in top for top in written.top_logprobs)
    (first, *_) = chat_logprobs(tokenizer, entries(ids), id_name).content
    assert first.token == f"token_id:{ids[0]}" and first.top_logprobs[0].token == "token_id:5"
    assert bytes(first.bytes) == tokenizer.token_bytes(ids[0])
