"""What a Responses body asks for: the chat call, the params, and what is refused or ignored."""

import pytest
from pydantic import ValidationError

from quire.core.sampling_params import SamplingDefaults
from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import InvalidRequestError
from quire.server.limits import CallLimits
from quire.server.routes.openai.responses.conversation import Conversation
from quire.server.routes.openai.responses.request_body import (
    LOGPROBS,
    InputTokensRequest,
    ResponsesRequest,
)
from quire.text.parsers.tool_use import ToolMode

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "name": "f", "parameters": SCHEMA}


def body(**fields):
    known, _ = ResponsesRequest.without_unknown({"input": "hi", **fields})
    return ResponsesRequest.model_validate(known)


def test_a_text_is_the_users_message():
    call = body(instructions="be kind").to_chat_call()
    assert list(call.messages) == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
    ]
    assert call.tool_use.tools == () and call.answer_format is None


def test_tools_and_reasoning_become_the_calls():
    call = body(
        tools=[TOOL],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "auto"},
        chat_template_kwargs={"x": 1},
    ).to_chat_call()
    assert call.tool_use.mode is ToolMode.REQUIRED and not call.tool_use.is_parallel
    assert call.reasoning.effort == "low" and call.chat_template_kwargs == {"x": 1}


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, StructuredOutputsParams(json_object=True)),
        ({"type": "json_object", "schema": {}}, StructuredOutputsParams(json_object=True)),
        ({"type": "json_object", "schema": SCHEMA}, StructuredOutputsParams(json=SCHEMA)),
        (
            {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True},
            StructuredOutputsParams(json=SCHEMA),
        ),
    ],
)
def test_the_form_of_the_text(form, expected):
    assert body(text={"format": form, "verbosity": "low"}).to_chat_call().answer_format == expected


def test_other_names_of_the_form_are_taken():
    assert body(guided_choice=["a", "b"]).to_chat_call().answer_format.choice == ["a", "b"]
    with pytest.raises(InvalidRequestError, match=r"text\.format and another field"):
        body(guided_regex="a+", text={"format": {"type": "json_object"}}).to_chat_call()


def test_params_are_the_bodys():
    params = body(max_output_tokens=7, temperature=0.5, top_k=3, seed=4, stop="x").to_params()
    assert params.sampling.max_tokens == 7 and params.sampling.top_k == 3
    assert params.sampling.logprobs is None
    asked = body(include=[LOGPROBS, "reasoning.encrypted_content"], top_logprobs=2)
    assert asked.to_params().sampling.logprobs == 2


def test_the_conversation_comes_first():
    found = body()
    found.continue_conversation(Conversation(history=({"role": "user", "content": "before"},)))
    contents = [message["content"] for message in found.to_chat_call().messages]
    assert contents == ["before", "hi"]


def test_the_answer_repeats_the_body():
    echo = body(
        tools=[TOOL, {"type": "web_search"}],
        metadata={"a": "b"},
        text={"verbosity": "low"},
        reasoning={"effort": "high"},
        store=True,
        prompt_cache_key="k",
        temperature=0,
    ).echo(SamplingDefaults(temperature=0.6, top_p=0.9), is_stored=False)
    assert (
        echo.tools == [{"description": None, "strict": None} | TOOL]
        and echo.metadata == {"a": "b"}
        and not echo.store
    )
    assert echo.text == {"format": {"type": "text"}, "verbosity": "low"}
    assert echo.reasoning["effort"] == "high" and echo.prompt_cache_key == "k"
    assert (echo.temperature, echo.top_p) == (0, 0.9)
    assert (echo.presence_penalty, echo.frequency_penalty, echo.top_logprobs) == (0, 0, 0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"n": 2}, "n"),
    ],
)
def test_unsupported_fields_that_change_the_answer_are_refused(fields, param):
    with pytest.raises(ValidationError) as caught:
        body(**fields)
    assert caught.value.errors()[0]["ctx"]["error"].param == param


def test_hints_and_what_asks_for_nothing_is_taken():
    body(
        **{"background": False, "truncation": "auto", "conversation": None, "n": 1},
        **{"user": "u", "safety_identifier": "s", "service_tier": "auto", "max_tool_calls": 3},
        prompt_cache_options={"mode": "implicit"},
        stream_options={"include_obfuscation": True},
        client_metadata={"thread": "t"},
    )
    known, ignored = ResponsesRequest.without_unknown(
        {"input": "", "weather": 1, "background": True}
    )
    assert ignored == ["weather"] and known["background"] is True


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"top_logprobs": 2}, "include lacks"),
        ({"include": [LOGPROBS], "tools": [TOOL]}, "does not go with tools that may be called"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_params_that_do_not_go_together(fields, said):
    with pytest.raises(InvalidRequestError, match=said):
        body(**fields).to_params()
    assert (
        body(include=[LOGPROBS], tools=[TOOL], tool_choice="none").to_params().sampling.logprobs
        == 0
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": {"format": "json"}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"reasoning": {"effort": 3}}, "reasoning"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_invalid_fields_are_named(fields, param):
    with pytest.raises(InvalidRequestError) as caught:
        body(**fields).to_chat_call()
    assert caught.value.param == param


def test_amounts_are_bounded():
    with pytest.raises(InvalidRequestError, match="at most 20"):
        body(include=[LOGPROBS], top_logprobs=21).check_amounts(CallLimits(), 20)
    with pytest.raises(ValidationError):
        body(max_output_tokens=0)


def test_a_count_takes_what_the_input_depends_on():
    fields = {"input": "hi", "tools": [TOOL], "temperature": 1.0, "stream": True}
    known, ignored = InputTokensRequest.without_unknown(fields)
    assert sorted(known) == ["input", "tools"] and ignored == ["temperature", "stream"]
    assert InputTokensRequest.model_validate(known).to_chat_call().tool_use.tools[0].name == "f"
