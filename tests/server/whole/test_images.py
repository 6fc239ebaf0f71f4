"""A server of a tiny random SmolVLM answers about images as transformers does, in every API."""

import base64

import pytest
from tests.images.pictures import file_of, random_picture
from tests.images.tiny_model import NUM_TOKENS, save_tiny
from tests.server.launching import launched

FIRST, SECOND = random_picture(90, 50), random_picture(90, 50, 1)
QUESTION = "What is it?"
PROMPT = f"<|im_start|>User:<image>{QUESTION}<end_of_utterance>\nAssistant:"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(tiny):
    options = {"model": str(tiny.folder), "dtype": "float32", "max_model_len": 256}
    sizes = {"block_size": 8, "max_num_batched_tokens": 32, "max_num_seqs": 8}
    with launched(options | sizes) as running:
        yield running


def text_of(picture):
    return base64.b64encode(file_of(picture)).decode()


def part_of(picture):
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text_of(picture)}"}}


def ask(server, *parts, **fields):
    body = {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": NUM_TOKENS}
    body |= {"temperature": 0, "logprobs": True, "return_tokens_as_token_ids": True} | fields
    return server.http.post("/v1/chat/completions", json=body)


def tokens_of(answer):
    entries = answer["choices"][0]["logprobs"]["content"]
    return [int(entry["token"].removeprefix("token_id:")) for entry in entries]


def test_tokens_equal_transformers_and_the_cache_is_hit(server, tiny):
    question = {"type": "text", "text": QUESTION}
    prompt = tiny.prompt_of(PROMPT, FIRST)["input_ids"][0].tolist()
    length, num_before = len(prompt), prompt.index(tiny.model.config.image_token_id)
    for picture in (FIRST, SECOND):
        answer = ask(server, part_of(picture), question).json()
        assert tokens_of(answer) == tiny.answer_to(PROMPT, picture)
        assert answer["usage"]["prompt_tokens"] == length
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] <= num_before
    again = ask(server, part_of(FIRST), question).json()
    assert tokens_of(again) == tiny.answer_to(PROMPT, FIRST)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= length - 8
    both = PROMPT.replace("<image>", "<image> and <image>")
    other = {"type": "text", "text": " and "}
    answer = ask(server, part_of(SECOND), other, part_of(FIRST), question).json()
    assert tokens_of(answer) == tiny.answer_to(both, SECOND, FIRST)


def test_all_apis_give_one_answer(server, tiny):
    expected = ask(server, part_of(FIRST), {"type": "text", "text": QUESTION}).json()
    text = expected["choices"][0]["message"]["content"]
    length = expected["usage"]["prompt_tokens"]
    source = {"type": "base64", "media_type": "image/png", "data": text_of(FIRST)}
    content = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0}
    answer = server.http.post("/v1/messages", json=body | {"max_tokens": NUM_TOKENS}).json()
    assert "".join(block["text"] for block in answer["content"]) == text
    count = server.http.post("/v1/messages/count_tokens", json={"messages": body["messages"]})
    assert count.json() == {"input_tokens": length}
    options = {"temperature": 0, "num_predict": NUM_TOKENS}
    ollama = {"prompt": QUESTION, "images": [text_of(FIRST)], "options": options, "stream": False}
    assert server.http.post("/api/generate", json=ollama).json()["response"] == text
    message = {"role": "user", "content": QUESTION, "images": [text_of(FIRST)]}
    ollama = {"messages": [message], "options": options, "stream": False}
    assert server.http.post("/api/chat", json=ollama).json()["message"]["content"] == text
    parts = [
        {"type": "input_image", "image_url": part_of(FIRST)["image_url"]["url"]},
        {"type": "input_text", "text": QUESTION},
    ]
    shown = server.http.post("/api/show", json={"model": str(tiny.folder)}).json()
    assert "vision" in shown["capabilities"]
    body = {"input": [{"role": "user", "content": parts}], "temperature": 0}
    answer = server.http.post("/v1/responses", json=body | {"max_output_tokens": NUM_TOKENS}).json()
    assert answer["output"][0]["content"][0]["text"] == text
    long = [*parts[:1] * 4, {"type": "input_text", "text": "x" * 100}]
    body = {"input": [{"role": "user", "content": long}], "truncation": "auto"}
    refused = server.http.post("/v1/responses", json=body).json()["error"]
    assert refused["param"] == "truncation"
    assert refused["message"].startswith("truncation would cut the prompt, which has images")
    body = {
        "messages": [{"role": "user", "content": [part_of(FIRST), parts[1] | {"type": "text"}]}]
    }
    shown = server.http.post("/api/show", json={"model": expected["model"]}).json()
    assert "vision" in shown["capabilities"]
    assert server.http.post("/tokenize", json=body).json()["count"] == length


def test_text_alone_and_refusals(server, tiny):
    text = {"type": "text", "text": "say <image>"}
    answer = ask(server, text).json()
    assert len(tokens_of(answer)) == NUM_TOKENS
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    for part, reason in (
        (broken, "the image messages[0].content[1] is no image of the formats"),
        (
            {"type": "video_url", "video_url": {"url": "x"}},
            "has a video, but this model takes none",
        ),
        ({"type": "image_url", "image_url": {"url": "https://a.b/"}}, "not allowed here"),
    ):
        refused = ask(server, text, part)
        assert refused.status_code == 400 and reason in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"] == "messages"
