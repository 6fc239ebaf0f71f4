"""Log-probabilities in OpenAI's two shapes, with characters cut across tokens."""

import math

import pytest

from quire.core.step import TokenLogprobs
from quire.engine.outputs import Logprob
from quire.server.logprobs import (
    CompletionLogprobsWriter,
    chat_logprobs,
    extend_logprobs,
    prompt_logprobs_json,
)

TEXT = "naïve 😀 x"


def entries(token_ids):
    """Each token second-best after token 5."""
    return [TokenLogprobs(token, -2.0, 2, (5, token), (-0.5, -2.0)) for token in token_ids]


def writer(tokenizer, prompt=(), num_top=2):
    return CompletionLogprobsWriter(tokenizer, prompt, num_top=num_top, skip_special_tokens=True)


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
    none = writer(tokenizer, num_top=0).write(entries(ids))
    assert [list(top.values()) for top in none.top_logprobs] == [[-2.0]] * len(ids)


def test_an_echo_comes_first_and_the_rest_goes_on_behind_it(tokenizer):
    prompt, generated = tokenizer.encode("import os"), tokenizer.encode("\nx")
    found = [None] + [{token: Logprob(-1.0, 3), 7: Logprob(-0.1, 1)} for token in prompt[1:]]
    written = writer(tokenizer, num_top=1)
    joined = written.echo(prompt, found)
    extend_logprobs(joined, written.write(entries(generated)))
    assert "".join(joined.tokens) == "import os\nx"
    assert joined.token_logprobs == [None, *[-1.0] * (len(prompt) - 1), *[-2.0] * len(generated)]
    assert joined.top_logprobs[0] is None
    assert joined.text_offset == [
        len("".join(joined.tokens[:at])) for at in range(len(joined.tokens))
    ]


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
def test_prompt_logprobs_are_cut_to_what_was_asked(num_top, ranks):
    found = {5: Logprob(-0.1, 1, "a"), 6: Logprob(-0.2, 2, "b"), 9: Logprob(-3.0, 3, "c")}
    first, second = prompt_logprobs_json([8, 9], [None, found], num_top)
    assert first is None
    assert [entry["rank"] for entry in second.values()] == ranks
    assert second["9"] == {"logprob": -3.0, "rank": 3, "decoded_token": "c"}
