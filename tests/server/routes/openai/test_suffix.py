"""Gaps that are filled over OpenAI's and Ollama's API, with a tokenizer that has tokens for it."""

import ollama
import pytest
from tests.server.launching import SEED, launched
from tests.server.thinking_folder import TEMPLATE, make_marked_tokenizer

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
PREFIX, SUFFIX = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"
GAP = {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    ids = make_marked_tokenizer(folder, MARKS, TEMPLATE)
    options = {"num_blocks": 256, "max_model_len": 256, "seed": SEED, "tokenizer": str(folder)}
    with launched(options) as running:
        yield [ids[mark] for mark in MARKS], running


def complete(server, **fields):
    answer = server.http.post("/v1/completions", json=GAP | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def test_the_prompt_has_the_tokens_of_the_family(marked):
    (first, second, third), server = marked

    def encode(text):
        body = {"prompt": text, "add_special_tokens": False}
        return server.http.post("/tokenize", json=body).json()["tokens"]

    (choice,) = complete(server, return_token_ids=True)
    prompt_token_ids = choice["prompt_token_ids"]
    expected = [first, *encode(PREFIX), second]
    assert prompt_token_ids[: len(expected)] == expected and prompt_token_ids[-1] == third
    (plain,) = complete(server, prompt=prompt_token_ids, suffix=None)
    assert plain["text"] == choice["text"]
    several = complete(server, prompt=[PREFIX, "x"], n=2)
    assert [each["text"] for each in several[:2]] == [choice["text"]] * 2


def test_ollamas_suffix_is_the_same(marked):
    _, server = marked
    talker = ollama.Client(host=server.url)
    options = {"num_predict": 8, "temperature": 0}
    wish = {"model": "embedded", "prompt": PREFIX, "suffix": SUFFIX, "options": options}
    (choice,) = complete(server)
    assert talker.generate(**wish).response == choice["text"]
    assert "insert" in talker.show("embedded").capabilities
    assert talker.generate(**wish | {"prompt": ""}).response
    talker._client.close()


def test_the_answer_ends_where_another_file_would_begin(marked):
    (first, _, _), server = marked
    bias = {str(first): 100}
    (choice,) = complete(server, logit_bias=bias)
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
