"""The table of docs/api.md says what the body does, and what Anthropic's package can send."""

import typing

import pytest
from anthropic.types import message_create_params as plain_params
from anthropic.types.beta import message_create_params as beta_params
from tests.server.whole.test_api_doc import fields_of, sections

from quire.errors import InvalidRequestError
from quire.server.generation.chat_call import ReasoningOptions
from quire.server.routes.anthropic.messages_body import (
    CountTokensRequest,
    MessagesRequest,
    PromptFields,
)

OLDER_FIELDS = {"temperature", "top_p", "top_k", "output_format"}
"""Of Anthropic's API, too: the package sends them as extra fields."""

HELLO = [{"role": "user", "content": "Hello"}]


def anthropics_fields():
    kinds = [module.MessageCreateParams for module in (plain_params, beta_params)]
    return {
        name
        for kind in kinds
        for each in typing.get_args(kind)
        for name in typing.get_type_hints(each)
    } | OLDER_FIELDS


def test_the_table_says_what_the_code_does():
    known = anthropics_fields()
    assert len(known) > 15
    listed = fields_of("/v1/messages")
    fields, hints = MessagesRequest.model_fields, MessagesRequest.hints
    assert listed == {
        name: "works" if name in known else "hint" if name in hints else "ours"
        for name in (*fields, *hints)
    }
    named = sections()["/v1/messages/count_tokens"]
    assert all(f"`{name}`" in named for name in CountTokensRequest.model_fields)


def test_every_field_has_its_note():
    assert all(MessagesRequest.note_of(name) for name in MessagesRequest.model_fields)
    assert all(PromptFields.note_of(name) for name in PromptFields.model_fields)


def test_a_body_becomes_a_chat_call():
    body = MessagesRequest.model_validate(
        {
            "max_tokens": 5,
            "system": "Be brief.",
            "messages": [*HELLO, {"role": "assistant", "content": "He"}],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "tools": [{"name": "read", "input_schema": {"type": "object"}}],
            "chat_template_kwargs": {"a": 1},
            "temperature": 0.5,
            "top_k": 3,
            "stop_sequences": ["\n\n"],
        }
    )
    call = body.to_chat_call()
    assert [message["role"] for message in call.messages] == ["system", "user", "assistant"]
    assert call.continue_final_message
    assert call.reasoning == ReasoningOptions(is_enabled=True, budget_tokens=1024)
    assert [tool.name for tool in call.tool_use.tools] == ["read"]
    assert call.chat_template_kwargs == {"a": 1}
    params = body.to_params().sampling
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 3, 5)
    assert list(params.stop) == ["\n\n"]


def test_the_model_begins_where_the_user_has_spoken_last():
    call = CountTokensRequest.model_validate({"messages": HELLO}).to_chat_call()
    assert not call.continue_final_message


def test_a_wrong_stop_sequence_is_named_as_anthropic_does():
    body = MessagesRequest.model_validate(
        {"max_tokens": 1, "messages": HELLO, "stop_sequences": [""]}
    )
    with pytest.raises(InvalidRequestError) as caught:
        body.to_params()
    assert caught.value.param == "stop_sequences"
