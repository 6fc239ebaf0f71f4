"""Forced calls, which the embedded model makes though it knows no tools: by OpenAI's own client."""

import json

import jsonschema
import openai
import pytest

QUESTION = [{"role": "user", "content": "What is in setup.py?"}]
READ = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads a file.",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string", "maxLength": 12},
                "lines": {"type": "integer", "minimum": 1, "maximum": 99},
                "mode": {"enum": ["text", "bytes"]},
            },
            "required": ["path", "lines", "mode"],
            "additionalProperties": False,
        },
    },
}
LIST = {"type": "function", "function": {"name": "list_files"}}
NAMED = {"type": "function", "function": {"name": "read_file"}}
GREEDY = {"model": "embedded", "temperature": 0, "tools": [READ, LIST], "max_tokens": 300}


def check(call):
    assert call.type == "function" and call.id.startswith("call_")
    given = json.loads(call.function.arguments)
    if call.function.name == "read_file":
        jsonschema.validate(given, READ["function"]["parameters"])
    else:
        assert (call.function.name, given) == ("list_files", {})


@pytest.mark.parametrize("seed", range(3))
def test_a_required_call_obeys_its_schema(client, seed):
    answer = client.chat.completions.create(
        **GREEDY | {"temperature": 1.0},
        seed=seed,
        messages=QUESTION,
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    check(call)


def test_a_function_that_is_named_is_called_once_and_ends_with_stop(client):
    answer = client.chat.completions.create(**GREEDY, messages=QUESTION, tool_choice=NAMED)
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    (call,) = choice.message.tool_calls
    assert call.function.name == "read_file"
    check(call)


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("max_tokens", [1, 3, 10])
def test_a_forced_call_that_max_tokens_cuts_is_no_text(client, choice, max_tokens):
    asked = GREEDY | {"max_tokens": max_tokens, "tool_choice": choice, "messages": QUESTION}
    (whole,) = client.chat.completions.create(**asked).choices
    assert whole.finish_reason == "length"
    assert not whole.message.content and not whole.message.tool_calls
    for chunk in client.chat.completions.create(**asked, stream=True):
        assert not chunk.choices[0].delta.content and not chunk.choices[0].delta.tool_calls


def test_only_tools_that_are_allowed_are_called(client):
    allowed = {"mode": "required", "tools": [LIST]}
    answer = client.chat.completions.create(
        **GREEDY,
        messages=QUESTION,
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
        parallel_tool_calls=False,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "list_files"
    check(call)


def test_the_clients_own_accumulation_of_a_stream_equals_the_whole(client):
    asked = GREEDY | {"tool_choice": NAMED, "messages": QUESTION}
    whole = client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        found = stream.get_final_completion().choices[0]
    assert found.finish_reason == whole.finish_reason
    (mine,), (theirs,) = found.message.tool_calls, whole.message.tool_calls
    assert (mine.function.name, mine.function.arguments) == (
        theirs.function.name,
        theirs.function.arguments,
    )
    assert found.message.content is None


def test_a_second_turn_has_the_call_and_its_result(client):
    first = client.chat.completions.create(**GREEDY, messages=QUESTION, tool_choice=NAMED)
    message = first.choices[0].message
    (call,) = message.tool_calls
    history = [
        *QUESTION,
        message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "import setuptools"},
    ]
    second = client.chat.completions.create(**GREEDY, messages=history, tool_choice="none")
    assert second.choices[0].message.content and not second.choices[0].message.tool_calls
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + 10


@pytest.mark.parametrize("spaces", [(", ", ": "), (",", ":")])
def test_a_second_turn_finds_all_of_the_first_in_the_cache(client, spaces):
    """But for the last token, which was not computed; however a client writes arguments anew.

    What the model may choose it writes in tokens of its choice, so that here it has none.
    """
    choices = {"mode": {"enum": ["text"]}, "why": {"enum": [f"a reason {spaces}"]}}
    schema = {"type": "object", "properties": choices, "required": ["mode", "why"]}
    schema["additionalProperties"] = False
    tool = {"type": "function", "function": {"name": "set_mode", "parameters": schema}}
    asked = GREEDY | {"tools": [tool]}
    first = client.chat.completions.create(
        **asked, messages=QUESTION, tool_choice="required", parallel_tool_calls=False
    )
    message = first.choices[0].message.model_dump()
    (call,) = message["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    call["function"]["arguments"] = json.dumps(arguments, separators=spaces)
    result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
    second = client.chat.completions.create(
        **asked, messages=[*QUESTION, message, result], tool_choice="none"
    )
    found = second.usage.prompt_tokens_details.cached_tokens
    assert found >= first.usage.prompt_tokens + first.usage.completion_tokens - 1


def test_a_call_that_is_cut_off_ends_with_length(client):
    asked = GREEDY | {"max_tokens": 30}
    answer = client.chat.completions.create(**asked, messages=QUESTION, tool_choice=NAMED)
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments.startswith("{")


def test_an_answer_without_calls_may_have_its_form_beside_tools(client):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}}
    schema |= {"required": ["ok"], "additionalProperties": False}
    answer = client.chat.completions.create(
        **GREEDY,
        messages=QUESTION,
        tool_choice="none",
        extra_body={"structured_outputs": {"json": schema, "disable_any_whitespace": True}},
    )
    assert answer.choices[0].finish_reason == "stop", answer.choices[0].message.content
    jsonschema.validate(json.loads(answer.choices[0].message.content), schema)


def test_a_schema_that_can_not_be_obeyed_is_refused_by_name(client):
    impossible = {"type": "object", "properties": {"a": {"type": "strong"}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": impossible, "strict": True}}
    asked = GREEDY | {"tools": [tool], "tool_choice": "required"}
    with pytest.raises(openai.BadRequestError, match="strong") as caught:
        client.chat.completions.create(**asked, messages=QUESTION)
    assert caught.value.param == "tools[0].function.parameters"
