"""How calls are answered: what is settled before their prompts are read."""

import asyncio
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from quire.core.adapters import AdapterRef
from quire.server.adapter_names import AdapterNames
from quire.server.generation import answer as answer_module
from quire.server.generation.http_generation import Prompts


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
            return Prompts([])

    async def prepare(*arguments: Any) -> None:
        raise ReachedError(arguments[-1])

    def nothing(*_: Any) -> None:
        pass

    service = SimpleNamespace(
        adapters=adapters,
        check_model=nothing,
        leave_out=nothing,
        answer_defaults=None,
        limits=None,
        default_deadline_s=None,
        engine=SimpleNamespace(limits=SimpleNamespace(max_logprobs=0)),
    )
    app = SimpleNamespace(state=SimpleNamespace(service=service))
    body = SimpleNamespace(
        model="sql",
        adopt=nothing,
        check_amounts=nothing,
        to_params=nothing,
        format_field="x",
        labels=[],
    )
    monkeypatch.setattr(answer_module, "prepare", prepare)
    monkeypatch.setattr(answer_module, "options_of", nothing)
    http: Any = SimpleNamespace(app=app, scope={})
    kind: Any = Kind

    with pytest.raises(ReachedError) as reached:
        asyncio.run(answer_module.generate(http, body, kind))

    assert reached.value.args[0] == AdapterRef("sql", "/sql", "digest")
