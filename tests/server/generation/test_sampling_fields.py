"""All bodies describe a sampling parameter by the bounds with which it is checked."""

import pytest

from quire.core.sampling_params import BOUNDS, MAX_TOKENS, SamplingParams
from quire.errors import InvalidRequestError
from quire.server.generation.sampling_fields import ChoiceFields, SamplingFields
from quire.server.routes.anthropic.messages_body import MessagesRequest
from quire.server.routes.openai.chat_body import ChatCompletionRequest
from quire.server.routes.openai.completions import CompletionRequest
from quire.server.routes.openai.responses.request_body import ResponsesRequest

BODIES = [MessagesRequest, ChatCompletionRequest, CompletionRequest, ResponsesRequest]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_a_body_documents_the_bounds_that_are_checked(body):
    properties = body.model_json_schema()["properties"]
    names = (BOUNDS.keys() & body.model_fields.keys()) - {"max_tokens"}
    assert names >= {"temperature", "top_p", "top_k", "min_p", "seed"}
    for name in names - ({"logprobs"} if body is ChatCompletionRequest else set()):
        field, bounds = properties[name], BOUNDS[name]
        assert field["minimum"] == bounds.low
        if bounds.high == MAX_TOKENS:
            assert "maximum" not in field
            assert next(each.get("exclusiveMaximum") for each in field["anyOf"]) == MAX_TOKENS + 1
        else:
            assert field.get("maximum") == bounds.high
        assert field["description"]


def test_the_shared_fields_are_parameters_of_the_same_names():
    for name in SamplingFields.model_fields:
        assert name in SamplingParams.checks


def test_only_fields_that_were_not_left_out_are_given():
    fields = SamplingFields(temperature=0.0, min_tokens=None, seed=5)
    assert fields.given(SamplingFields.model_fields) == {"temperature": 0.0, "seed": 5}
    assert fields.given(["seed", "top_p"]) == {"seed": 5}
    assert "stop" not in ChoiceFields.model_fields


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_a_value_beyond_a_bound_is_refused_by_the_params(name):
    low, high, _ = BOUNDS[name]
    for value in (low, high):
        assert SamplingParams(**{name: value}).checks
    for value in (low - 1, high + 1):
        with pytest.raises(InvalidRequestError, match=f"{name} is .* at least {low:g} and at most"):
            SamplingParams(**{name: value})
