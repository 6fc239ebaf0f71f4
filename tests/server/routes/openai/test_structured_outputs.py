"""Answers that obey a form, over HTTP: completions and chat, whole and streamed."""

import json
from typing import Any

import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
AS_OPENAI = {"type": "json_schema", "json_schema": {"name": "t", "schema": SCHEMA, "strict": True}}


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    asked = {"max_tokens": 200, "temperature": 1.0, "seed": 3, **fields}
    if path == COMPLETIONS:
        return {"prompt": "import os\n", **asked}
    return {"messages": [{"role": "user", "content": "hello"}], **asked}


def text_of(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop", choice
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_answer_obeys_its_form_whole_and_streamed(http, path: str) -> None:
    tight = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}
    whole = text_of(http.post(path, json=body_of(path, **tight)))
    assert set(json.loads(whole)) == {"a", "b"}
    lines = http.post(path, json=body_of(path, stream=True, **tight)).text.split("\n\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    pieces = [each.get("text") or each.get("delta", {}).get("content") or "" for each in choices]
    assert "".join(pieces) == whole
    assert choices[-1]["finish_reason"] == "stop"
    assert text_of(http.post(path, json=body_of(path, guided_choice=["ja", "nein"]))) in (
        "ja",
        "nein",
    )


def test_a_response_format_is_obeyed(http) -> None:
    fields = {"response_format": AS_OPENAI, "bad_words": ["\n", " ", "\t", "\r"]}
    answer = http.post(CHAT, json=body_of(CHAT, **fields)).json()
    assert answer["choices"][0]["message"]["content"].startswith("{")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"guided_regex": "(a"}, "regex"),
        ({"structured_outputs": {"grammar": "start: missing"}}, "grammar"),
        ({"guided_json": {"type": "objekt"}}, "json"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "schema is 5"),
        ({"guided_regex": "a", "response_format": AS_OPENAI}, "one form"),
        ({"use_beam_search": True, "n": 2, "guided_regex": "a"}, "use_beam_search"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_form_that_can_not_be_obeyed_is_a_400(
    http, path: str, fields: dict[str, Any], words: str
) -> None:
    body = body_of(path, **fields)
    if "use_beam_search" in fields:
        del body["seed"]
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["param"] in fields


def test_a_call_without_an_allowed_token_gets_422(http) -> None:
    text = {"prompt": "7", "add_special_tokens": False}
    digit = http.post("/tokenize", json=text).json()["tokens"][-1]
    fields = {"guided_regex": "[a-f]+", "allowed_token_ids": [digit]}
    answer = http.post(COMPLETIONS, json=body_of(COMPLETIONS, **fields))
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "no_token_left")
