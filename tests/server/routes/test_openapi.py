"""The OpenAPI document agrees with what answers and bodies look like."""

import msgspec
import pytest
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from quire.errors import InvalidRequestError
from quire.server.app import create_app
from quire.server.routes.endpoint import Endpoints
from quire.server.routes.openai.chat_body import ChatCompletionRequest
from quire.server.routes.openai.completions import CompletionRequest
from quire.server.routes.openapi import answers, api_document, json_schema
from quire.server.served_models import ServedModels
from quire.server.service import Service
from quire.text.chat_messages import check_messages


class Inner(msgspec.Struct):
    """What is inside."""

    word: str


class Outer(msgspec.Struct):
    """What is outside."""

    inner: list[Inner]
    other: Inner | None = None
    maybe: int | UnsetType = UNSET


@pytest.fixture(scope="module")
def document():
    return api_document(create_app(ServedModels.of(Service(None, None, None, "mine"))).routes)


def test_a_schema_is_in_one_piece():
    schema = json_schema(Outer)
    inner = schema["properties"]["inner"]["items"]
    assert inner["properties"] == {"word": {"type": "string"}}
    assert schema["required"] == ["inner"]
    assert schema["properties"]["maybe"] == {"type": "integer"}
    assert "$ref" not in str(schema)


def test_a_route_tells_its_answer_its_stream_and_its_errors():
    router = Endpoints()

    @router.get("/x", answers(Outer, streams=True))
    async def find() -> Response: ...

    responses = api_document(router.routes)["paths"]["/x"]["get"]["responses"]
    assert set(responses) == {"200", "4XX", "5XX"}
    schema = responses["200"]["content"]["application/json"]["schema"]
    assert (schema["title"], set(schema["properties"])) == ("Outer", {"inner", "other", "maybe"})
    assert "text/event-stream" in responses["200"]["content"]
    error = responses["4XX"]["content"]["application/json"]["schema"]["properties"]["error"]
    assert error["required"] == ["message", "type", "param", "code"]


def test_the_document_tells_the_answers_of_every_family(document):
    for path in (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models/{name}",
        "/tokenize",
        "/detokenize",
        "/version",
    ):
        (route,) = document["paths"][path].values()
        schema = route["responses"]["200"]["content"]["application/json"]["schema"]
        assert schema["type"] == "object"
        assert schema["properties"]
        assert set(route["responses"]) == {"200", "4XX", "5XX"}


def test_every_body_is_described_once(document):
    schemas = document["components"]["schemas"]
    assert list(schemas) == sorted(schemas)
    bodies = {
        method["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        for methods in document["paths"].values()
        for method in methods.values()
        if "requestBody" in method
    }
    assert bodies < {f"#/components/schemas/{name}" for name in schemas}
    assert schemas["CompletionRequest"]["properties"]["seed"]["maximum"] == 2**64 - 1


def test_names_of_the_path_and_fields_of_the_query_are_described(document):
    items = document["paths"]["/v1/responses/{response_id}/input_items"]["get"]
    path, *query = items["parameters"]
    assert (path["name"], path["in"], path["required"]) == ("response_id", "path", True)
    assert {field["name"] for field in query} == {"after", "limit", "order"}
    schemas = {field["name"]: field["schema"] for field in query}
    assert schemas["order"]["enum"] == ["asc", "desc"]
    assert (schemas["limit"]["maximum"], schemas["limit"]["default"]) == (100, 20)
    assert not any(field["required"] for field in query)


def test_operations_have_names_of_their_own_and_no_head(document):
    calls = [call for methods in document["paths"].values() for call in methods.values()]
    assert len({call["operationId"] for call in calls}) == len(calls)
    assert set(document["paths"]["/health"]) == {"get"}


NUMBERS = [
    name
    for name, field in CompletionRequest.model_json_schema()["properties"].items()
    if {"minimum", "maximum", "exclusiveMinimum"} & field.keys()
]


@pytest.mark.parametrize("name", NUMBERS)
def test_bounds_in_the_document_are_those_that_are_checked(name):
    """A value at a bound makes sampling parameters, one beyond it does not."""
    field = CompletionRequest.model_json_schema()["properties"][name]
    kinds = field.get("type") or [kind["type"] for kind in field["anyOf"]]
    step = 1 if "integer" in kinds else 1e-6

    def accepts(value):
        more = {"use_beam_search": True} if name == "length_penalty" else {}
        more |= {"echo": True} if name == "max_tokens" else {}  # which alone may be 0
        more |= {"n": value} if name == "best_of" else {}
        try:
            body = CompletionRequest.model_validate({"prompt": "x", name: value} | more)
            return body.to_params() is not None
        except ValueError as error:
            assert isinstance(error, InvalidRequestError) or name in str(error)
            return False

    if "minimum" in field:
        assert accepts(field["minimum"])
        assert not accepts(field["minimum"] - step)
    if "maximum" in field:
        assert accepts(field["maximum"])
        assert not accepts(field["maximum"] + step)
    if "exclusiveMinimum" in field:
        assert accepts(field["exclusiveMinimum"] + step)
        assert not accepts(field["exclusiveMinimum"])


def test_the_bounds_of_numbers_are_told():
    assert {"n", "temperature", "top_p", "seed", "logprobs", "min_p", "length_penalty"} <= set(
        NUMBERS
    )


ODD_VALUES = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        0.5,
        1.5,
        -0.5,
        100,
        101,
        -2.5,
        2**31,
        2**63,
        2**64,
        -(2**63),
    ),
    *("", "x", "auto", [], [1], ["a"], [""], [-1], [1.5], [True], [None], [[1]], [[]], [{}]),
    *({}, {"1": 1}, {"1": 101}, {"x": 1}, {"1": "a"}, {"type": "text"}, {"include_usage": True}),
    *([{"role": "user", "content": "x"}], [{"role": "", "content": "x"}], [{"role": 1}]),
    [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    [{"role": "user", "content": [{"type": "image"}]}],
]


@pytest.mark.parametrize("model", [CompletionRequest, ChatCompletionRequest])
def test_bodies_accept_exactly_the_values_that_the_document_allows(model):
    validators = pytest.importorskip("jsonschema_rs", reason="pip install jsonschema_rs")
    document = validators.validator_for(model.model_json_schema())
    plain = {"prompt": "x"} if model is CompletionRequest else {"messages": ODD_VALUES[-2]}
    num_accepted = 0
    for name in {*model.model_fields, *model.not_supported, "extra_body", "nonsense"}:
        for value in ODD_VALUES:
            body = plain | {name: value}
            try:
                accepted = model.model_validate(body)
                accepted.to_params()
                if model is ChatCompletionRequest:
                    check_messages(accepted.messages)
                    accepted.to_chat_call()
            except ValueError:
                continue
            num_accepted += 1
            if name != "nonsense":  # null is accepted in any place
                assert document.is_valid(body), (name, value)
    assert num_accepted > 100
