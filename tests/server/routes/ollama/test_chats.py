"""Ollama's API through its own client, on the embedded model."""

import json
import math
import re

import ollama
import pytest

QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]
GREEDY = {"temperature": 0, "num_predict": 60}


@pytest.fixture
def talker(server, http):
    client = ollama.Client(host=server.url)
    yield client
    client._client.close()


def joined(lines):
    return "".join(line.message.content or "" for line in lines)


def test_a_chat_is_answered_whole_and_in_lines(talker, client):
    whole = talker.chat(model="embedded", messages=QUESTION, options=GREEDY, think=False)
    chat = client.chat.completions.create(
        model="embedded", messages=QUESTION, temperature=0, max_tokens=60
    )
    assert whole.message.content == chat.choices[0].message.content
    assert (whole.done, whole.done_reason, whole.model) == (True, "length", "embedded")
    assert whole.prompt_eval_count == chat.usage.prompt_tokens
    assert whole.eval_count == 60
    *lines, last = talker.chat(
        model="embedded:latest", messages=QUESTION, options=GREEDY, stream=True
    )
    # Accepted drafts, here of the same answer before, join up to 16 tokens in a line.
    assert joined(lines) == whole.message.content and len(lines) > 1
    assert not any(line.done for line in lines)
    assert (last.done, last.done_reason, last.eval_count) == (True, "length", 60)


def test_a_prompt_is_a_user_s_message(talker):
    options = GREEDY | {"num_ctx": 8192, "stop": ["xyzzy"]}
    chat = talker.chat(
        model="embedded",
        messages=[{"role": "system", "content": "Be brief."}, *QUESTION],
        options=options,
    )
    text = {"prompt": QUESTION[0]["content"], "system": "Be brief.", "options": options}
    whole = talker.generate(model="embedded", **text)
    assert whole.response == chat.message.content
    lines = talker.generate(model="embedded", **text, stream=True)
    assert "".join(line.response for line in lines) == whole.response


def test_an_answer_tells_how_long_it_took(talker):
    whole = talker.chat(model="embedded", messages=QUESTION, options=GREEDY)
    *lines, last = talker.generate(model="embedded", prompt="x", options=GREEDY, stream=True)
    for end in (whole, last):
        assert min(end.prompt_eval_duration, end.eval_duration) > 0 == end.load_duration
        # The engine's phases leave out the queue and the way to the client.
        assert end.prompt_eval_duration + end.eval_duration < end.total_duration
    assert all(line.total_duration is None for line in lines)


def test_durations_are_those_of_the_engine(server, talker):
    def seconds():
        times = server.http.get("/metrics", headers=server.operator).text
        pattern = r"^quire_(prefill|decode)_time_seconds_sum (\S+)$"
        return {name: float(sum_) for name, sum_ in re.findall(pattern, times, re.MULTILINE)}

    before = seconds()
    whole = talker.generate(model="embedded", prompt="xyz", options=GREEDY)
    after = seconds()
    took = {name: round((after[name] - before[name]) * 1e9) for name in before}
    told = {"prefill": whole.prompt_eval_duration, "decode": whole.eval_duration}
    assert told == pytest.approx(took, abs=1000)


def test_an_answer_that_a_stop_string_ends_has_its_durations(talker):
    options = GREEDY | {"stop": ["e"]}
    whole = talker.chat(model="embedded", messages=QUESTION, options=options)
    assert whole.done_reason == "stop"
    assert whole.prompt_eval_duration > 0 <= whole.eval_duration < whole.total_duration


def test_a_raw_prompt_has_no_template(talker, client):
    prompt = "import os\n"
    text = client.completions.create(model="embedded", prompt=prompt, temperature=0, max_tokens=60)
    whole = talker.generate(model="embedded", prompt=prompt, raw=True, options=GREEDY)
    assert whole.response == text.choices[0].text
    assert whole.prompt_eval_count == text.usage.prompt_tokens and whole.thinking is None
    lines = talker.generate(model="embedded", prompt=prompt, raw=True, options=GREEDY, stream=True)
    assert "".join(line.response for line in lines) == whole.response
    form = talker.generate(
        model="embedded", prompt="{", raw=True, options=GREEDY, format={"enum": ["x"]}
    )
    assert form.response == '"x"'


def test_tags_and_show_describe_the_served_model(talker):
    (model,) = talker.list().models
    assert model.model == "embedded" and model.modified_at.year >= 2020
    # Ollama's own program takes the first 12 characters, and fails if there are fewer.
    assert re.fullmatch("[0-9a-f]{64}", model.digest) and model.size > 1_000_000
    shown = talker.show("embedded:latest")
    assert shown.capabilities == ["completion", "tools"] and "messages" in shown.template
    assert shown.modified_at == model.modified_at and shown.details == model.details
    family = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{family}.context_length"] == 1024
    assert shown.modelinfo[f"{family}.embedding_length"] > 0
    with pytest.raises(ollama.ResponseError, match="not served here") as caught:
        talker.show("llama3")
    assert caught.value.status_code == 404


def test_clients_load_and_unload_without_an_answer(talker):
    for keep_alive, reason in ((None, "load"), ("5m", "load"), (0, "unload"), ("0s", "unload")):
        whole = talker.generate(model="embedded", keep_alive=keep_alive)
        assert (whole.response, whole.done, whole.done_reason) == ("", True, reason)
    (line,) = talker.chat(model="embedded", messages=[], stream=True)
    assert (line.message.content, line.done, line.done_reason) == ("", True, "load")
    with pytest.raises(ollama.ResponseError, match="not served here"):
        talker.generate(model="llama3")


def test_the_served_model_runs_and_is_pulled_at_once(talker, http):
    (model,) = talker.ps().models
    assert model.model == "embedded" and model.context_length == 1024
    assert model.size > 1_000_000 and model.size_vram == 0
    assert model.digest == talker.list().models[0].digest
    assert talker.pull("embedded").status == "success"
    assert [line.status for line in talker.pull("embedded", stream=True)][-1] == "success"
    with pytest.raises(ollama.ResponseError, match="'llama3' is not served"):
        talker.pull("llama3")
    with pytest.raises(ollama.ResponseError, match=r"/api/delete changes no models here"):
        talker.delete("embedded")
    assert http.head("/").status_code == 200
    assert http.get("/").text == "quire is running"


def test_texts_are_embedded_as_by_openai_s_path(talker, client):
    texts = ["open a file", "close it"]
    found = talker.embed(model="embedded:latest", input=texts)
    wanted = client.embeddings.create(model="embedded", input=texts)
    assert found.embeddings == [each.embedding for each in wanted.data]
    assert found.prompt_eval_count == wanted.usage.prompt_tokens and found.total_duration > 0
    assert talker.embed(model="embedded", input=texts[0]).embeddings == found.embeddings[:1]
    plain = talker.embeddings(model="embedded", prompt=texts[0]).embedding
    scale = math.hypot(*plain)
    assert [x / scale for x in plain] == pytest.approx(found.embeddings[0], abs=1e-6)
    long = talker.embed(model="embedded", input="a b c d " * 2000)
    assert long.prompt_eval_count == 1024
    with pytest.raises(ollama.ResponseError, match="max_model_len"):
        talker.embed(model="embedded", input="a b c d " * 2000, truncate=False)


def test_a_history_with_calls_is_understood(talker):
    calls = [{"function": {"name": "read", "arguments": {"path": "a"}}}] * 2
    results = [{"role": "tool", "tool_name": "read", "content": text} for text in ("b", "c")]
    messages = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    answer = talker.chat(model="embedded", messages=messages, options=GREEDY)
    assert answer.message.role == "assistant"
    assert answer.prompt_eval_count > 20


def test_streams_are_lines_of_json_and_options_without_effect_are_named(http):
    body = {"messages": QUESTION, "keep_alive": "5m", "mirostat": 2}
    body["options"] = {"num_predict": 3, "num_gpu": 1, "tfs_z": 1.0}
    answer = http.post("/api/chat", json=body)
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.headers["x-ignored-fields"] == "mirostat, options.tfs_z"
    assert [json.loads(line)["done"] for line in answer.text.splitlines()][-1]
    assert http.get("/api/version").json()["version"]


@pytest.mark.parametrize("kind", [None, "", "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_is_json_whatever_its_content_type_says(http, kind):
    """As `curl -d` and litellm send it. A page's has to say so: it could be sent unasked."""
    headers = {} if kind is None else {"Content-Type": kind}
    body = json.dumps({"messages": QUESTION, "options": {"num_predict": 1}, "stream": False})
    answer = http.post("/api/chat", content=body, headers=headers)
    assert answer.status_code == 200 and answer.json()["eval_count"] == 1
    for origin in ("null", "https://page.example"):
        refused = http.post("/api/chat", content=body, headers=headers | {"Origin": origin})
        assert refused.status_code == 400 and "Content-Type" in refused.json()["error"]


@pytest.mark.parametrize(
    ("path", "fields", "status", "words"),
    [
        ("/api/embed", {"input": []}, 400, "input is empty"),
        ("/api/embed", {"input": ["a", ""]}, 400, "text 1 is empty"),
        ("/api/embeddings", {"prompt": "a", "model": "llama3"}, 404, "not served here"),
        ("/api/chat", {"model": "llama3", "messages": QUESTION}, 404, "not served here"),
        ("/api/chat", {"messages": "hi"}, 400, "messages is 'hi'"),
        ("/api/chat", {"messages": [5]}, 400, "messages[0] is 5"),
        ("/api/chat", {"messages": [QUESTION[0] | {"images": ["x"]}]}, 400, "has images"),
        ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [1]}]}, 400, "name a"),
        ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": 1}]}, 400, "be a list"),
        ("/api/chat", {"messages": QUESTION, "format": "xml"}, 400, "format is 'xml'"),
        ("/api/chat", {"messages": [{"content": "a"}]}, 400, "has the role None"),
        ("/api/chat", {"messages": QUESTION, "tools": 5}, 400, "tools is 5"),
        ("/api/chat", {"messages": QUESTION, "tools": [5]}, 400, "tools[0] is 5"),
        ("/api/chat", {"messages": QUESTION, "options": {"top_p": 7}}, 400, "top_p"),
        ("/api/chat", {"messages": QUESTION, "tools": [{}] * 4097}, 400, "tools has 4097 entries"),
        ("/api/generate", {"options": {"stop": ["a"] * 65}}, 400, "options.stop has 65 entries"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "no tokens for filling a gap"),
        ("/api/generate", {"prompt": "a", "raw": True, "system": "b"}, 400, "system is set, but"),
        ("/api/generate", {"prompt": "a", "raw": True, "think": True}, 400, "think is set, but"),
        ("/api/generate", {"prompt": "a", "images": ["x"]}, 400, "images is not supported"),
    ],
)
def test_mistakes_are_told_in_ollama_s_form(http, path, fields, status, words):
    answer = http.post(path, json=fields)
    assert answer.status_code == status
    assert list(answer.json()) == ["error"] and words in answer.json()["error"]
