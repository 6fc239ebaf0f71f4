"""An endpoint added from outside, by one file and one registration, has what all others have."""

import asyncio
import json
from dataclasses import replace
from functools import partial
from typing import ClassVar

import httpx
import pytest
from starlette.responses import JSONResponse, Response
from tests.registering import restored
from tests.server.generation.test_http_generation import FakeEngine
from tests.server.routes.upper import router

from quire.core.request import FinishReason, SequenceOutput
from quire.errors import ConfigurationError, InvalidRequestError, StepFailedError
from quire.server.app import all_endpoints, create_app
from quire.server.endpoint_registry import ENDPOINTS
from quire.server.generation.seeds import Seeds
from quire.server.http.body import Body
from quire.server.http.guard import AccessConfig
from quire.server.limits import CallLimits
from quire.server.routes.endpoint import MAX_FIELDS, Endpoints, check_parsed
from quire.server.routes.openapi import api_document
from quire.server.served_models import ServedModels
from quire.server.service import Service
from quire.server.tenants.keys import ApiKeys
from quire.server.tenants.tenants import TenantBook

PATH = "/v1/echo-upper"
ALICE = {"Authorization": "Bearer alice-key-1"}


class Named(Body):
    name: str


class Numbered(Body):
    number: int


class TwoTokens(FakeEngine):
    """Answers every branch of a request with the two tokens of "print(", or fails at the second."""

    tokens: tuple[int, ...] = ()
    fails: bool = False

    def generate(self, requests, sink):
        stream = super().generate(requests, sink)
        for request in requests:
            for branch in range(request.n):
                asyncio.get_running_loop().call_soon(self._play, stream, request, branch)
        return stream

    def _play(self, stream, request, branch):
        first, second = self.tokens
        stream.push(SequenceOutput(request.request_id, branch, (first,), 0))
        error = "a kernel failed" if self.fails else None
        reason = FinishReason.ERROR if self.fails else FinishReason.LENGTH
        stream.push(SequenceOutput(request.request_id, branch, (second,), 0, reason, error=error))


@pytest.fixture
def service(tokenizer):
    engine = TwoTokens()
    engine.tokens = tuple(tokenizer.encode("print("))[:2]
    return Service(
        engine,
        tokenizer,
        None,
        "mine",
        Seeds(1),
        limits=CallLimits(max_n=4, max_stop_strings=2),
        tenants=TenantBook(max_requests=3),
    )


def ask(service, body=None, *, headers=ALICE, path=PATH, method="POST"):
    """The answer of an application that has the endpoint, and keys."""
    access = AccessConfig(keys=ApiKeys(["alice:alice-key-1"]), max_body_bytes=10_000)
    with restored(ENDPOINTS):
        ENDPOINTS.register("upper", router)
        app = create_app(ServedModels.of(service), access)
    return asyncio.run(send(app, method, path, body, headers))


async def send(app, method, path, body, headers):
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        content = None if body is None else json.dumps(body)
        headers_ = {"Content-Type": "application/json", **headers}
        return await client.request(method, path, content=content, headers=headers_)


def test_it_answers_in_one_piece(service, tokenizer):
    answer = ask(service, {"prompt": "a", "n": 2})
    assert answer.status_code == 200
    found = answer.json()
    text = tokenizer.decode(list(service.engine.tokens)).upper()
    assert found["id"].startswith("upper-") and found["texts"] == [text] * 2
    assert found["usage"]["completion_tokens"] == 4


def test_it_answers_as_a_stream(service, tokenizer):
    body = {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}
    answer = ask(service, body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, usage, done = answer.text.strip().split("\n\n")
    texts = [json.loads(event.removeprefix("data: "))["texts"][0] for event in events]
    assert "".join(texts) == tokenizer.decode(list(service.engine.tokens)).upper()
    assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == 2
    assert done == "data: [DONE]"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": "a", "n": 5}, 400, "n"),
        ({"prompt": "a", "stop": ["x"] * 3}, 400, "stop"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature"),
        ({"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ({"prompt": "a", "tempature": 1}, 400, "tempature"),
        ({}, 400, "prompt"),
        ({"prompt": "a", "model": "other"}, 404, "model"),
        ({"prompt": "a" * 20_000}, 413, None),
    ],
)
def test_its_limits_and_its_errors_are_the_usual_ones(service, body, status, param):
    answer = ask(service, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_it_needs_a_key_and_counts_for_the_tenant(service):
    assert ask(service, {"prompt": "a"}, headers={}).status_code == 401
    assert "may have 3 open at once" in ask(service, {"prompt": "a", "n": 4}).text
    assert ask(service, {"prompt": "a"}).status_code == 200
    assert service.tenants.num_open() == {"alice": 0}
    assert service.monitor.tenants["alice"].num_generated_tokens == 2


def test_it_is_counted_and_logged_under_its_path(service):
    ask(service, {"prompt": "a"})
    ask(service, {"prompt": 5})
    assert service.monitor.http_calls == {("POST", PATH, 200): 1, ("POST", PATH, 400): 1}
    assert service.monitor.finished == {("length", "alice"): 1}


def test_it_is_in_the_document_on_its_page_and_in_the_hints(service):
    document = ask(service, path="/openapi.json", method="GET").json()
    post = document["paths"][PATH]["post"]
    assert post["description"] == "Continue the prompt in capital letters."
    fields = document["components"]["schemas"]["UpperBody"]["properties"]
    assert fields["prompt"]["description"] == "the text to continue"
    assert fields["suffix"]["description"] == "not supported yet"
    assert PATH in ask(service, path="/docs", method="GET").text
    assert PATH in ask(service, path="/nope", method="GET").json()["error"]["message"]
    assert PATH in ask(service, path="/v1/audio", method="GET").json()["error"]["message"]


def test_its_errors_have_its_own_form_wherever_they_arise(service, monkeypatch):
    def form(status, message, param, code):
        return {"type": "error", "error": {"message": message, "code": code}}

    monkeypatch.setattr(router, "error_form", form)
    for body, headers in (
        ({"prompt": 5}, ALICE),
        ({"prompt": "a"}, {}),
        ({"prompt": "a" * 20_000}, ALICE),
    ):
        assert ask(service, body, headers=headers).json()["type"] == "error"
    assert "type" not in ask(service, {"prompt": 5}, path="/v1/completions").json()
    service.engine.fails = True
    assert ask(service, {"prompt": "a"}).json()["error"]["code"] == StepFailedError.code
    *_, failure, done = ask(service, {"prompt": "a", "stream": True}).text.strip().split("\n\n")
    assert json.loads(failure.removeprefix("data: "))["type"] == "error"
    assert done == "data: [DONE]"


def test_its_form_of_errors_holds_on_paths_with_parameters_too(service):
    def form(status, message, param, code):
        return {"type": "error", "error": message}

    mine = Endpoints(error_form=form)

    @mine.post("/v1/items/{name}")
    async def keep(name: str, body: Named | Numbered) -> Response:
        return JSONResponse([name, body.model_dump()])

    app = create_app(
        ServedModels.of(service),
        AccessConfig(keys=ApiKeys(["alice:alice-key-1"])),
        endpoints=[mine],
    )

    def post(body, headers):
        return asyncio.run(send(app, "POST", "/v1/items/a", body, headers))

    assert post({"number": 5}, ALICE).json() == ["a", {"number": 5}]
    for body, headers, status in (({}, ALICE, 400), ({"name": "b"}, {}, 401)):
        answer = post(body, headers)
        assert (answer.status_code, answer.json()["type"]) == (status, "error")


def test_fields_of_the_query_are_validated_and_named(service):
    mine = Endpoints()

    @mine.get("/v1/items/{name}")
    async def list_items(name: str, limit: int, after: str | None = None) -> dict[str, object]:
        return {"name": name, "limit": limit, "after": after}

    app = create_app(ServedModels.of(service), AccessConfig(), endpoints=[mine])

    def get(query):
        return asyncio.run(send(app, "GET", f"/v1/items/a{query}", None, {}))

    assert get("?limit=3&other=1").json() == {"name": "a", "limit": 3, "after": None}
    assert get("?limit=3&after=b").json()["after"] == "b"
    for query, message in (("", "limit is missing"), ("?limit=x", "query.limit should be a valid")):
        answer = get(query)
        assert answer.status_code == 400 and message in answer.json()["error"]["message"]
    path, limit, after = api_document(app.routes)["paths"]["/v1/items/{name}"]["get"]["parameters"]
    assert [path["required"], limit["required"], after["required"]] == [True, True, False]


@pytest.mark.parametrize("which", ["open_paths", "operator_paths"])
def test_access_lists_refuse_paths_with_parameters(which):
    with pytest.raises(ValueError, match="has a parameter"):
        Endpoints(**{which: ["/v1/items/{name}"]})


class Lenient(Named):
    unknown_fields: ClassVar = "ignore"


def test_ignored_fields_are_named_in_a_header(service):
    lenient = Endpoints()

    @lenient.post("/v1/names")
    async def keep(body: Lenient) -> Response:
        return JSONResponse(body.name)

    app = create_app(ServedModels.of(service), AccessConfig(), endpoints=[lenient])

    def post(body):
        return asyncio.run(send(app, "POST", "/v1/names", body, {}))

    assert "x-ignored-fields" not in post({"name": "a", "other": None}).headers
    answer = post({"name": "a", "other": 1, "näme\r\nSet-Cookie: x, y": 2, "z" * 900: 3, "last": 4})
    assert (answer.status_code, answer.json()) == (200, "a")
    named = answer.headers["x-ignored-fields"].split(", ")
    assert named == ["other", "n?me??Set-Cookie: x? y", "z" * 80, "last"]
    many = post({"name": "a"} | {f"field{n}": n for n in range(900)})
    assert len(many.headers["x-ignored-fields"]) == 1000


def test_bodies_have_bounds_of_fields_and_of_values():
    checked = partial(check_parsed, kind=Named, limits=CallLimits(), max_model_len=1)
    checked(few := {f"field{n}": n for n in range(MAX_FIELDS)})
    for many in (few | {"name": "a"}, {"extra_body": few | {"name": "a"}}):
        with pytest.raises(InvalidRequestError, match="has 1001 fields, above the bound of 1000"):
            checked(many)
    taking_ids = {kind for kind in all_bodies(Body) if kind.max_values > Body.max_values}
    assert {kind.__name__ for kind in taking_ids} == {
        "CompletionRequest",
        "DetokenizeRequest",
        "EmbeddingRequest",
    }


def all_bodies(kind):
    return {kind}.union(*map(all_bodies, kind.__subclasses__()))


@pytest.mark.parametrize(("rule", "status"), [(None, 200), ("ignore", 200), ("refuse", 400)])
def test_the_operator_says_what_happens_to_unknown_fields(service, rule, status):
    apart = Endpoints()

    @apart.post("/v1/names")
    async def keep(body: Lenient) -> Response:
        return JSONResponse(body.name)

    @apart.post("/v1/strict")
    async def keep_strictly(body: Named) -> Response:
        return JSONResponse(body.name)

    app = create_app(
        ServedModels.of(replace(service, unknown_fields=rule)), AccessConfig(), endpoints=[apart]
    )
    body = {"name": "a", "other": 1}
    assert asyncio.run(send(app, "POST", "/v1/names", body, {})).status_code == status
    strict = asyncio.run(send(app, "POST", "/v1/strict", body, {}))
    assert strict.status_code == (200 if rule == "ignore" else 400)
    assert strict.headers.get("x-ignored-fields") == ("other" if rule == "ignore" else None)


def test_two_endpoints_for_one_route_are_refused_by_name():
    second = Endpoints()

    @second.post(PATH)
    async def answer(body: Named) -> Response:
        return JSONResponse(body.name)

    with restored(ENDPOINTS):
        ENDPOINTS.register("upper", router)
        assert all_endpoints()[-1] is router
        ENDPOINTS.register("second", second)
        message = f"the endpoints upper and second both answer POST {PATH}; give one of them"
        with pytest.raises(ConfigurationError, match=message):
            all_endpoints()


def test_a_batch_may_not_call_the_operator_s_paths():
    endpoints = Endpoints(operator_paths=("/v1/named",))

    @endpoints.post("/v1/named")
    async def name(body: Named) -> Response:
        return JSONResponse({})

    @endpoints.post("/v1/numbered")
    async def number(body: Numbered) -> Response:
        return JSONResponse({})

    assert endpoints.batch_paths == ["/v1/numbered"]
