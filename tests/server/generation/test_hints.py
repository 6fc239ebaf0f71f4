"""Fields on which no caller relies are taken by every body that asks for generated text."""

import pytest

from quire.errors import InvalidRequestError
from quire.server.generation.call_body import HINTS
from quire.server.routes.anthropic.messages_body import CountTokensRequest, MessagesRequest
from quire.server.routes.ollama.ollama_body import OllamaChatRequest, OllamaGenerateRequest
from quire.server.routes.openai.chat_body import ChatCompletionRequest
from quire.server.routes.openai.completions import CompletionRequest
from quire.server.routes.openai.responses.request_body import ResponsesRequest

HELLO = [{"role": "user", "content": "hello"}]
BODIES = {
    CompletionRequest: {"prompt": "hello"},
    ChatCompletionRequest: {"messages": HELLO},
    ResponsesRequest: {"input": "hello"},
    MessagesRequest: {"messages": HELLO, "max_tokens": 5},
    CountTokensRequest: {"messages": HELLO},
    OllamaChatRequest: {"messages": HELLO},
    OllamaGenerateRequest: {"prompt": "hello"},
}
VALUES = {
    "cache_control": {"type": "ephemeral"},
    "metadata": {"run": "7"},
    "parallel_tool_calls": True,
    "prompt_cache_key": "key",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "request_id": "mine",
    "safety_identifier": "ada",
    "service_tier": "auto",
    "store": True,
    "user": "ada",
    "verbosity": "medium",
}
"""As clients send them."""


def test_every_hint_has_a_test_value():
    assert set(VALUES) >= HINTS


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("kind", BODIES)
def test_a_hint_is_taken_and_changes_nothing(kind, name):
    """Also where fields that nobody knows are refused: this is what `model_validate` does."""
    plain, hinted = (
        kind.model_validate(BODIES[kind] | more) for more in ({}, {name: VALUES[name]})
    )
    known, unknown = kind.without_unknown(BODIES[kind] | {name: VALUES[name]})
    assert name in known and not unknown
    if hasattr(plain, "to_params"):
        assert hinted.to_params() == plain.to_params()
    if hasattr(plain, "to_chat_call"):
        assert hinted.to_chat_call() == plain.to_chat_call()


@pytest.mark.parametrize("kind", BODIES)
def test_unknown_fields_are_refused_or_left_out_by_name(kind):
    body = BODIES[kind] | {"weather": "fine"}
    with pytest.raises(ValueError, match="unknown field 'weather'") as caught:
        kind.model_validate(body)
    assert isinstance(caught.value.errors()[0]["ctx"]["error"], InvalidRequestError)
    assert kind.without_unknown(body)[1] == ["weather"]
    ignores = kind not in (CompletionRequest, ChatCompletionRequest)
    assert kind.unknown_fields == ("ignore" if ignores else "refuse")


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (ChatCompletionRequest, {"reasoning_effort": "none"}),
        (ChatCompletionRequest, {"top_logprobs": 0}),
        (ChatCompletionRequest, {"early_stopping": False}),
        (ChatCompletionRequest, {"stream": True, "stream_options": {"include_obfuscation": True}}),
        (CompletionRequest, {"early_stopping": False, "safe_prompt": False}),
        (ResponsesRequest, {"stream": True, "stream_options": {"include_obfuscation": True}}),
        (ResponsesRequest, {"text": {"verbosity": "medium"}, "reasoning": {"effort": "none"}}),
        (OllamaChatRequest, {"keep_alive": "5m", "options": {"num_ctx": 4096}}),
    ],
)
def test_fields_without_effect_are_accepted(kind, more):
    plain = kind.model_validate(BODIES[kind])
    assert kind.model_validate(BODIES[kind] | more).to_params() == plain.to_params()


def takes_whole_numbers(schema):
    kinds = schema.get("type", [])
    return "integer" in ([kinds] if isinstance(kinds, str) else kinds) or any(
        takes_whole_numbers(each) for each in schema.get("anyOf", ())
    )


@pytest.mark.parametrize("kind", BODIES)
def test_a_whole_number_may_have_a_point(kind):
    """As JSON's own numbers, and the document's `integer`: Lua and some form editors write 8.0."""
    fields = kind.model_json_schema()["properties"]
    names = [name for name in fields if takes_whole_numbers(fields[name])]
    assert names or kind in (CountTokensRequest, OllamaChatRequest, OllamaGenerateRequest)
    for name in names:
        plain, pointed = (kind.model_validate(BODIES[kind] | {name: value}) for value in (8, 8.0))
        assert pointed.model_dump() == plain.model_dump() and type(getattr(pointed, name)) is int
        with pytest.raises(ValueError):
            kind.model_validate(BODIES[kind] | {name: 8.5})


def test_whole_numbers_inside_of_objects_may_have_a_point():
    options = {"num_predict": 8.0, "top_k": 4.0, "seed": 1.0}
    wish = OllamaChatRequest.model_validate({"messages": HELLO, "options": options})
    params = wish.to_params().sampling
    assert repr((params.max_tokens, params.top_k, params.seed)) == "(8, 4, 1)"
    thinking = {"type": "enabled", "budget_tokens": 8.0}
    fields = {"messages": HELLO, "max_tokens": 5, "thinking": thinking}
    wish = MessagesRequest.model_validate(fields)
    assert repr(wish.to_chat_call().reasoning.budget_tokens) == "8"
    body = {"prompt": [1.0, 2.0], "stop_token_ids": [3.0], "logit_bias": {"5": 1.0}}
    completion = CompletionRequest.model_validate(body)
    assert repr((completion.prompts, completion.stop_token_ids)) == "([[1, 2]], [3])"
