"""Quotas and deadlines hold on every route that has work done by the engine."""

import asyncio
from dataclasses import replace

import pytest
from benchmarks.server.mutations import routes
from tests.server.generation.test_http_generation import FakeEngine
from tests.server.routes.test_new_endpoint import ALICE, send
from tests.server.whole.test_who_sees_what import EXAMPLES

from quire.errors import OverloadedError
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.server.app import create_app
from quire.server.http.guard import AccessConfig
from quire.server.served_models import ServedModels
from quire.server.service import Service
from quire.server.tenants.keys import ApiKeys
from quire.server.tenants.tenants import Tenant, TenantBook
from quire.text.chat_template import ChatTemplate

PATHS = sorted(path for path, kind in routes().items() if "deadline_s" in kind.model_fields)
TENANT = Tenant("alice")


@pytest.fixture(scope="module")
def template():
    return ChatTemplate.from_folder(EMBEDDED_MODEL)


@pytest.fixture
def post(tokenizer, template):
    engine = FakeEngine()
    engine.limits = replace(engine.limits, max_model_len=1024)

    def ask(path, book, **fields):
        service = Service(engine, tokenizer, template, "embedded", tenants=book)
        app = create_app(
            ServedModels.of(service), AccessConfig(keys=ApiKeys(["alice:alice-key-1"]))
        )
        body = EXAMPLES["POST", path] | fields
        answer = asyncio.run(send(app, "POST", path, body, ALICE))
        assert not engine.requests, "the engine has heard nothing of it"
        return answer

    return ask


def test_only_routes_that_need_no_engine_have_no_deadline():
    assert {*routes()} - {*PATHS} == {
        "/api/pull",
        "/api/show",
        "/detokenize",
        "/replicas/restart",
        "/replicas/scale",
        "/tokenize",
        "/v1/batches",
        "/v1/load_lora_adapter",
        "/v1/messages/count_tokens",
        "/v1/responses/input_tokens",
        "/v1/unload_lora_adapter",
    }


@pytest.mark.parametrize("path", PATHS)
def test_a_tenant_has_only_so_much_open(post, path):
    book = TenantBook(max_requests=3)
    book.open(TENANT, 3, 0)
    answer = post(path, book)
    assert answer.status_code == 429 and "3 generations open" in answer.text
    assert book.num_open() == {"alice": 3}


@pytest.mark.parametrize("path", PATHS)
def test_the_tokens_of_a_tenant_per_minute_are_bounded(post, path):
    book = TenantBook(max_tokens_per_minute=100)
    book.open(TENANT, 1, 90).count(500)
    answer = post(path, book)
    assert answer.status_code == 429 and "tokens per minute" in answer.text
    assert int(answer.headers["retry-after"]) > 1


@pytest.mark.parametrize("path", PATHS)
def test_a_call_ends_at_its_deadline(post, path):
    answer = post(path, TenantBook(), deadline_s=1e-9)
    assert answer.status_code == 408 and "deadline" in answer.text


def test_calls_refused_by_the_engine_are_not_charged(tokenizer, template):
    engine = FakeEngine()
    engine.limits = replace(engine.limits, max_model_len=1024)
    book = TenantBook(max_tokens_per_minute=100)

    def full(requests, sink):
        raise OverloadedError("there is no room")

    engine.generate = full
    service = Service(engine, tokenizer, template, "embedded", tenants=book)
    app = create_app(ServedModels.of(service), AccessConfig(keys=ApiKeys(["alice:alice-key-1"])))
    body = {"model": "embedded", "prompt": [5] * 90}
    for _ in range(3):
        answer = asyncio.run(send(app, "POST", "/v1/completions", body, ALICE))
        assert answer.status_code == 429 and "no room" in answer.text
    assert book.num_open() == {"alice": 0}
