"""How calls are answered: what is settled before their prompts are read."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from tests.server.generation.test_http_generation import FakeEngine

from quire.core.adapters import AdapterRef
from quire.server.adapter_names import AdapterNames
from quire.server.app import create_app
from quire.server.generation import answer as answer_module
from quire.server.generation.grammar_checks import GrammarChecks
from quire.server.generation.http_generation import Prompts
from quire.server.http.guard import AccessConfig
from quire.server.served_models import ServedModels
from quire.server.service import Service
from quire.text.chat_template import ChatTemplate


class ReachedError(Exception):
    """The adapter that the requests are made with."""


class Engine:
    async def find_adapter(self, name: str, path: str, *, anew: bool = False) -> AdapterRef:
        return AdapterRef(name, path, "digest")


def test_a_name_taken_away_meanwhile_still_names_the_adapter(monkeypatch) -> None:
    """Never the model itself, whose name the call did not say."""
    engine: Any = Engine()
    adapters = AdapterNames(engine, {"sql": "/sql"})

    class Kind:
        id_prefix, operation = "x", "x"
        field_names: ClassVar[dict[str, str]] = {}

        @staticmethod
        async def prompts(service: Any, body: Any) -> Prompts:
            service.adapters.unload("sql")
            return Prompts(["x"])

    async def prepare(*arguments: Any) -> None:
        raise ReachedError(arguments[-1])

    def nothing(*_: Any, **__: Any) -> None:
        pass

    service = SimpleNamespace(
        adapters=adapters,
        check_model=nothing,
        report_or_refuse_fields=nothing,
        answer_defaults=None,
        limits=None,
        default_deadline_s=None,
        engine=SimpleNamespace(limits=SimpleNamespace(max_logprobs=0)),
    )
    app = SimpleNamespace(
        state=SimpleNamespace(models=SimpleNamespace(unnamed_service=lambda _: service))
    )
    params = SimpleNamespace(sampling=SimpleNamespace(structured_outputs=None))
    body = SimpleNamespace(
        model="sql",
        adopt=nothing,
        check_amounts=nothing,
        to_params=lambda: params,
        format_field="x",
        labels=[],
        speculation_history=True,
    )
    monkeypatch.setattr(answer_module, "prepare", prepare)
    monkeypatch.setattr(answer_module, "options_of", nothing)
    http: Any = SimpleNamespace(app=app, scope={})
    kind: Any = Kind

    with pytest.raises(ReachedError) as reached:
        asyncio.run(answer_module.generate(http, body, kind))

    assert reached.value.args[0] == AdapterRef("sql", "/sql", "digest")


class Endless:
    """Makes a grammar without end. events: what became of it."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.events: list[str] = []

    async def make(self, form: str, origin: str) -> str | None:
        self.events.append("begun")
        self.has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.events.append("ended")
        return None


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_the_making_of_its_grammar(tokenizer, stream) -> None:
    async def run() -> tuple[list[str], list[Any]]:
        maker = Endless()
        template = ChatTemplate({}, {})
        service = Service(FakeEngine(), tokenizer, template, "mine", grammars=GrammarChecks(maker))
        body = {"prompt": "x", "stream": stream, "structured_outputs": {"regex": "a"}}
        pending = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        sent: list[Any] = []

        async def receive() -> Any:
            if pending:
                return pending.pop()
            await maker.has_begun.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json"), (b"host", b"here")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": headers,
            "http_version": "1.1",
            "scheme": "http",
            "server": ("here", 80),
            "client": ("there", 1),
            "state": {},
        }
        await asyncio.wait_for(
            create_app(ServedModels.of(service), AccessConfig())(scope, receive, send), 30
        )
        return maker.events, sent

    events, sent = asyncio.run(run())
    assert events == ["begun", "ended"]
    assert [each["status"] for each in sent if "status" in each] == [499]
