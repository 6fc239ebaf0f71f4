"""Responses that are stored: gone on from, read, listed, deleted, each tenant's apart."""

import asyncio

import pytest
from tests.server.in_process_grammars import InProcessGrammars
from tests.server.responding import check_whole, items_of, read_events
from tests.server.routes.test_new_endpoint import TwoTokens, send

from quire.hub.model_folder import EMBEDDED_MODEL
from quire.server.app import create_app
from quire.server.generation.answer_store import AnswerStore
from quire.server.generation.grammar_checks import GrammarChecks
from quire.server.generation.seeds import Seeds
from quire.server.http.guard import AccessConfig
from quire.server.served_models import ServedModels
from quire.server.service import Service
from quire.server.tenants.keys import ApiKeys
from quire.text.chat_template import ChatTemplate
from quire.text.parsers.dialect_choice import find_dialect

PATH = "/v1/responses"
KEYS = ["alice:alice-key-1", "bob:bob-key-1"]


@pytest.fixture
def service(tokenizer):
    engine = TwoTokens()
    engine.tokens = tuple(tokenizer.encode("print("))[:2]
    template = ChatTemplate.from_folder(EMBEDDED_MODEL)
    dialect = find_dialect(None)
    return Service(
        engine,
        tokenizer,
        template,
        "mine",
        Seeds(1),
        answers=AnswerStore(1 << 20),
        dialect=dialect,
        grammars=GrammarChecks(InProcessGrammars(dialect, tokenizer)),
    )


@pytest.fixture
def ask(service):
    app = create_app(ServedModels.of(service), AccessConfig(keys=ApiKeys(KEYS)))

    def call(method, path, body=None, *, who="alice"):
        headers = {"Authorization": f"Bearer {who}-key-1"}
        return asyncio.run(send(app, method, path, body, headers))

    return call


def prompt(service):
    return service.tokenizer.decode(service.engine.requests[-1].prompt_token_ids)


def test_a_conversation_goes_on_from_what_is_stored(ask, service):
    first = ask("POST", PATH, {"input": "one", "instructions": "be kind"}).json()
    assert first["store"] is True
    second = ask("POST", PATH, {"input": "two", "previous_response_id": first["id"]}).json()
    said = first["output"][0]["content"][0]["text"]
    places = [prompt(service).index(part) for part in ("one", said, "two")]
    assert places == sorted(places) and "be kind" not in prompt(service)
    assert second["previous_response_id"] == first["id"]
    third = {"input": "three", "previous_response_id": second["id"], "stream": True}
    events = read_events(ask("POST", PATH, third).text)
    assert items_of(events) and prompt(service).count(said) == 2
    fourth = {"input": "four", "previous_response_id": events[-1]["response"]["id"]}
    assert ask("POST", PATH, fourth).status_code == 200
    assert prompt(service).count(said) == 3


@pytest.mark.parametrize("streams", [False, True])
def test_a_stored_response_equals_the_answer(ask, streams):
    answer = ask("POST", PATH, {"input": "one", "stream": streams})
    whole = read_events(answer.text)[-1]["response"] if streams else answer.json()
    stored = ask("GET", f"{PATH}/{whole['id']}")
    check_whole(stored.json())
    assert {**stored.json(), "completed_at": 0} == {**whole, "completed_at": 0}
    refused = ask("GET", f"{PATH}/{whole['id']}?stream=true")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")


def test_only_what_may_be_stored_is(ask, service):
    answer = ask("POST", PATH, {"input": "one", "store": False}).json()
    assert answer["store"] is False and len(service.answers) == 0


def test_without_keys_other_headers_see_nothing_of_it(service):
    """Behind a gateway that checks keys they identify the client, as for cached prefixes."""
    app = create_app(ServedModels.of(service))

    def ask(method, path, body=None, headers=None):
        return asyncio.run(send(app, method, path, body, headers or {}))

    alice, bob = {"Authorization": "Bearer alice"}, {"X-Api-Key": "bob"}
    made = ask("POST", PATH, {"input": "one"}, alice).json()["id"]
    for other in ({}, bob, alice | bob):
        assert ask("GET", f"{PATH}/{made}", headers=other).status_code == 404
        assert ask("DELETE", f"{PATH}/{made}", headers=other).status_code == 404
        more = {"input": "two", "previous_response_id": made}
        assert ask("POST", PATH, more, other).status_code == 400
    assert ask("GET", f"{PATH}/{made}", headers=alice).status_code == 200
    assert ask("POST", PATH, more, alice).status_code == 200


def test_another_tenant_sees_nothing_of_it(ask):
    made = ask("POST", PATH, {"input": "one"}).json()["id"]
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        assert ask(method, f"{PATH}/{made}{path}", who="bob").status_code == 404
    going_on = {"input": "two", "previous_response_id": made}
    assert ask("POST", PATH, going_on, who="bob").status_code == 400
    assert ask("POST", PATH, going_on).status_code == 200


def test_a_deleted_response_is_gone(ask):
    made = ask("POST", PATH, {"input": "one"}).json()["id"]
    assert ask("DELETE", f"{PATH}/{made}").json()["deleted"] is True
    assert ask("GET", f"{PATH}/{made}").status_code == 404
    error = ask("POST", PATH, {"input": "two", "previous_response_id": made})
    assert error.status_code == 400 and "not stored here, or no longer" in error.text


def test_input_items_are_listed_page_by_page(ask):
    first = ask("POST", PATH, {"input": [{"role": "user", "content": f"q{n}"} for n in range(3)]})
    second = ask("POST", PATH, {"input": "last", "previous_response_id": first.json()["id"]})
    path = f"{PATH}/{second.json()['id']}/input_items"
    everything = ask("GET", f"{path}?order=asc").json()
    texts = [item["content"][0]["text"] for item in everything["data"]]
    assert texts[:3] == ["q0", "q1", "q2"] and texts[4] == "last" and len(texts) == 5
    assert everything["has_more"] is False
    page = ask("GET", f"{path}?limit=2").json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["last", texts[3]]
    assert page["has_more"] is True and page["last_id"] == page["data"][-1]["id"]
    rest = ask("GET", f"{path}?after={page['last_id']}&limit=100").json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["q2", "q1", "q0"]
    assert ask("GET", f"{path}?after=nothing").status_code == 400
    assert ask("GET", f"{path}?limit=0").status_code == 400


def test_a_stored_item_can_be_referred_to(ask, service):
    made = ask("POST", PATH, {"input": "one"}).json()
    item = made["output"][0]
    reference = [{"type": "item_reference", "id": item["id"]}, {"role": "user", "content": "two"}]
    assert ask("POST", PATH, {"input": reference}).status_code == 200
    assert item["content"][0]["text"] in prompt(service)
    assert ask("POST", PATH, {"input": reference}, who="bob").status_code == 400


def test_an_input_is_counted_with_its_conversation(ask, service):
    made = ask("POST", PATH, {"input": "one"}).json()["id"]
    body = {
        "input": "two",
        "previous_response_id": made,
        "tools": [{"type": "mcp"}, {"type": "function", "name": "f"}],
    }
    counted = ask("POST", f"{PATH}/input_tokens", body)
    assert counted.headers["x-ignored-fields"] == "tools[0] (mcp)"
    billed = ask("POST", PATH, body).json()["usage"]["input_tokens"]
    assert counted.json() == {"input_tokens": billed, "object": "response.input_tokens"}


@pytest.mark.parametrize("path", ["/compact", "/resp_1/cancel", "/resp_1/tool_outputs"])
def test_unsupported_response_paths_get_not_supported(ask, path):
    answer = ask("POST", PATH + path, {})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_supported")


def test_an_engine_that_fails_ends_the_stream_with_a_failed_response(ask, service):
    service.engine.fails = True
    answer = ask("POST", PATH, {"input": "one", "stream": True})
    events = read_events(answer.text)
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2]["message"] == events[-1]["response"]["error"]["message"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert len(service.answers) == 0


def test_an_item_is_referred_to_once(ask, service):
    item = {"role": "user", "content": "one", "type": None, "id": None}
    first = ask("POST", PATH, {"input": [item]}).json()
    (listed,) = ask("GET", f"{PATH}/{first['id']}/input_items").json()["data"]
    assert listed["type"] == "message"
    reference = {"type": "item_reference", "id": listed["id"]}
    answer = ask("POST", PATH, {"input": [reference] * 2})
    assert answer.status_code == 400 and "same item twice" in answer.json()["error"]["message"]
    own = {"role": "user", "content": "mine", "id": listed["id"]}
    assert ask("POST", PATH, {"input": [own]}).status_code == 200
    assert "mine" in prompt(service)


def test_unknown_fields_of_an_item_are_not_stored(ask, service):
    part = {"type": "input_text", "text": "one", "junk": "x" * 1000}
    item = {"role": "user", "content": [part], "count": 10**30, "ratio": 1.5, "status": {"a": 1}}
    first = ask("POST", PATH, {"input": [item]})
    assert first.status_code == 200
    (listed,) = ask("GET", f"{PATH}/{first.json()['id']}/input_items").json()["data"]
    assert listed.pop("id").startswith("msg_")
    kept = {"type": "input_text", "text": "one"}
    assert listed == {"type": "message", "role": "user", "status": "completed", "content": [kept]}


def test_tools_are_counted_before_they_are_read(ask):
    answer = ask("POST", PATH, {"input": "one", "tools": [{}] * 4097})
    assert answer.status_code == 400 and "4097 entries" in answer.json()["error"]["message"]
