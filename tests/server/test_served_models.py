"""Tests of the model that a call gets by its name and its key."""

import asyncio
from types import SimpleNamespace

import pytest
from starlette.requests import Request as HTTPRequest

from quire.errors import EngineDeadError, InvalidRequestError, ServerDrainingError
from quire.server.hosted_model import HostedModel, ModelNotLoadedError, Phase
from quire.server.model_room import ModelRoom
from quire.server.served_models import ServedModels, service_named
from quire.server.service import Service, SharedState, UnknownModelError, service_of
from quire.server.tenants.tenants import NO_TENANT, Tenant, TenantBook

BOB = Tenant("bob", models=frozenset(["embed", "sql"]))


def several(**shared):
    models = [
        HostedModel(("chat", "gpt"), given_adapters=("sql",)),
        HostedModel(("vectors", "embed")),
    ]
    return ServedModels(SharedState(**shared), models, ModelRoom(models, 1, 1.0, 9))


def call(tenant=NO_TENANT, *, is_operator=False):
    async def receive():
        await asyncio.Event().wait()

    state = {"tenant": tenant, "is_operator": is_operator}
    return HTTPRequest({"type": "http", "headers": [], "state": state}, receive)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (None, "chat"),
        ("dummy", "chat"),
        ("gpt", "chat"),
        ("sql", "chat"),
        ("vectors", "vectors"),
        ("embed", "vectors"),
    ],
)
def test_a_call_gets_the_model_that_it_names_by_any_name(name, found):
    async def main():
        assert several().find(name, NO_TENANT).name == found

    asyncio.run(main())


def test_a_tenant_gets_only_models_that_it_may_use():
    async def main():
        models = several()
        assert [each.name for each in models.visible_to(BOB)] == ["vectors"]
        assert models.find(None, BOB).name == "vectors"
        with pytest.raises(UnknownModelError, match=r"'chat' is not .* has 'vectors', 'embed' "):
            models.find("chat", BOB)
        with pytest.raises(InvalidRequestError, match="model must be a text"):
            models.find(7, BOB)

    asyncio.run(main())


def test_the_only_model_of_a_server_is_limited_to_tenants_too():
    models = ServedModels.of(Service(None, None, None, "mine", other_names=("embed",)))
    assert models.find("anything", BOB) is models.default  # `check_model` compares the name
    with pytest.raises(UnknownModelError):
        models.find("mine", Tenant("eve", models=frozenset(["chat"])))


def test_a_model_that_is_not_in_memory_has_no_service():
    async def main():
        models = several()
        with pytest.raises(ModelNotLoadedError, match="'chat' is unloaded; a call that names it"):
            _ = models.default_service

    asyncio.run(main())


def test_a_question_that_names_no_model_gets_none_that_its_key_may_not_use():
    async def main():
        models = several()
        http = call(BOB)
        http.scope["app"] = SimpleNamespace(state=SimpleNamespace(models=models))
        models.default.phase, models.default.service = Phase.LOADED, SimpleNamespace()
        for find in (service_of, lambda http: service_named(http, None)):
            with pytest.raises(ModelNotLoadedError, match="'vectors' is unloaded"):
                find(http)
            http.scope["state"]["tenant"] = Tenant("eve", models=frozenset(["other"]))
            with pytest.raises(UnknownModelError, match="has none that this key may use"):
                find(http)
            http.scope["state"]["tenant"] = BOB

    asyncio.run(main())


@pytest.mark.parametrize("is_operator", [True, False])
def test_only_the_operator_learns_why_a_model_could_not_be_loaded(is_operator):
    async def main():
        models = several(tenants=TenantBook(1))
        model = models.default
        model.note_failure(
            EngineDeadError("/secret/path is gone"), asyncio.get_running_loop().time()
        )
        http = call(is_operator=is_operator)
        for _ in range(2):  # the tenant's one open generation is given back each time
            with pytest.raises(Exception, match=r"/secret/path" if is_operator else "log says why"):
                await models.enter(http, model)
        models.leave(http.scope)
        assert model.num_calls == 0

    asyncio.run(main())


def test_a_server_that_ends_loads_nothing():
    async def main():
        models = several()
        models.shared.drain.begin()
        with pytest.raises(ServerDrainingError):
            await models.enter(call(), models.default)

    asyncio.run(main())


def test_a_call_leaves_its_model_once():
    async def main():
        models = several()
        model = models.default
        model.phase, model.service = Phase.LOADED, SimpleNamespace()
        http = call()
        await models.enter(http, model)
        assert (model.num_calls, http.scope["state"]["service"]) == (1, model.service)
        for _ in range(2):
            models.leave(http.scope)
        assert model.num_calls == 0

    asyncio.run(main())
