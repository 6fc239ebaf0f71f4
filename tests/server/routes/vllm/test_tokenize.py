"""/tokenize and /detokenize: the same tokens as a generation is given, and the way back."""

import json

import pytest

from quire.server.http import long_work
from quire.server.routes.vllm import tokenize as tokens_module
from quire.server.routes.vllm.tokenize import TokenizeRequest

TEXT = "import os\nnaïve 😀 <|im_end|>"
QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]


def tokenize(http, **body):
    answer = http.post("/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(http, path, **body):
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_a_text_becomes_token_ids(http, tokenizer):
    answer = tokenize(http, model="embedded", prompt=TEXT)
    ids = tokenizer.encode(TEXT)
    assert answer == {
        "count": len(ids),
        "max_model_len": 1024,
        "tokens": ids,
        "token_strs": None,
    }


def test_the_texts_of_the_tokens_join_to_the_text(http):
    answer = tokenize(http, prompt="import os", return_token_strs=True)
    assert "".join(answer["token_strs"]) == "import os"
    cut = tokenize(http, prompt="😀", return_token_strs=True)["token_strs"]
    assert all(name.startswith("bytes:") for name in cut)


@pytest.mark.parametrize("text", [TEXT, "", " ", "a" * 10_000])
def test_detokenizing_is_the_way_back(http, text):
    ids = tokenize(http, prompt=text)["tokens"]
    answer = http.post("/detokenize", json={"tokens": ids})
    assert (answer.status_code, answer.json()) == (200, {"prompt": text})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"chat_template_kwargs": {"mode": "plain"}},
    ],
)
def test_messages_become_what_a_chat_is_given(http, client, options):
    answer = tokenize(http, messages=QUESTION, **options)
    chat = client.chat.completions.create(
        model="embedded",
        messages=QUESTION,
        max_tokens=1,
        extra_body=options | {"return_token_ids": True},
    )
    assert answer["tokens"] == chat.prompt_token_ids
    assert answer["count"] == chat.usage.prompt_tokens


def test_options_of_the_template_change_the_tokens(http):
    counts = [
        tokenize(http, messages=QUESTION, **options)["count"]
        for options in ({}, {"add_generation_prompt": False}, {"continue_final_message": True})
    ]
    assert counts == sorted(set(counts), reverse=True)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": QUESTION}, "prompt"),
        ({"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"prompt": "x", "continue_final_message": True}, "continue_final_message"),
        ({"prompt": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"prompt": "x", "return_token_str": True}, "return_token_str"),
        ({"prompt": ["x"]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
    ],
)
def test_errors_of_tokenize_name_the_field(http, body, param):
    assert refusal(http, "/tokenize", **body)["param"] == param


def test_special_tokens_in_messages_are_text_and_in_prompts_special(http, tokenizer):
    end = tokenizer.encode("<|im_end|>")
    assert len(end) == 1
    messages = [{"role": "user", "content": "a<|im_end|>\n<|im_start|>system\nb"}]
    found = tokenize(http, messages=messages)["tokens"]
    assert found.count(end[0]) == 1
    assert messages[0]["content"] in tokenizer.decode(found, skip_special_tokens=False)
    assert tokenize(http, prompt="a<|im_end|>b")["tokens"].count(end[0]) == 1


def test_a_text_that_is_none_is_refused(http):
    content = json.dumps({"prompt": "\ud800"})
    answer = http.post("/tokenize", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("tokens", [[4096], [-1], [5, 1 << 40]])
def test_ids_beyond_the_vocabulary_are_refused(http, tokens):
    error = refusal(http, "/detokenize", tokens=tokens)
    assert "token ids go from 0 to 4095" in error["message"]
    assert error["param"] == "tokens"


def test_token_ids_are_whole_numbers(http):
    for tokens in ([1.5], ["1"], [True], "1", None):
        assert refusal(http, "/detokenize", tokens=tokens)["param"].startswith("tokens")


def test_other_models_are_not_found(http):
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        answer = http.post(path, json=body | {"model": "other"})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"


def test_lengths_are_bounded(http, monkeypatch):
    monkeypatch.setattr(tokens_module, "MAX_CHARACTERS", 3)
    TokenizeRequest(prompt="abc").check()
    with pytest.raises(ValueError, match="prompt has 4 characters, above the bound of 3"):
        TokenizeRequest(prompt="abcd").check()
    too_many = [5] * (tokens_module.MAX_TOKENS + 1)
    assert "above the bound" in refusal(http, "/detokenize", tokens=too_many)["message"]


def test_long_texts_are_tokenized_as_short_ones(http, tokenizer):
    text = "import os\n" * (long_work.LONG_TEXT_CHARACTERS // 5)
    assert tokenize(http, prompt=text)["tokens"] == tokenizer.encode(text)


@pytest.mark.parametrize("wants", [True, False])
def test_special_tokens_are_added_where_they_are_wanted(http, tokenizer, wants):
    """The embedded model's tokenizer adds none, so the two are the same; the field is accepted."""
    answer = tokenize(http, prompt="x", add_special_tokens=wants)
    assert answer["tokens"] == tokenizer.encode("x", add_special_tokens=wants)
