"""What the operator hears of a fleet that can't be as it was asked to, or changes meanwhile."""

import asyncio
from types import SimpleNamespace

import pytest

from quire.cluster.scaling import ScalingConfig
from quire.engine_client.recovery import EngineState
from quire.errors import ConfigurationError, EngineDeadError, InvalidRequestError
from quire.server.http.body_budget import BodyBudget
from quire.server.http.open_connections import OpenConnections
from quire.server.routes.admin import metrics
from quire.server.routes.admin import replicas as routes
from quire.server.routes.admin.replicas import (
    RestartReplicasRequest,
    ScaleReplicasRequest,
    restart_replicas,
    scale_replicas,
)
from quire.server.served_models import ServedModels


@pytest.mark.parametrize(
    ("raised", "answered", "says"),
    [
        (ConfigurationError("every agent has its replica"), InvalidRequestError, "every agent"),
        (ConnectionRefusedError("nobody listens"), EngineDeadError, "nobody listens"),
    ],
)
def test_why_a_fleet_can_not_be_so_is_said(monkeypatch, raised, answered, says) -> None:
    async def fail(*arguments: object) -> None:
        raise raised

    engines = SimpleNamespace(scale=fail, restart=fail)
    view = SimpleNamespace(state=EngineState.READY)
    fleet = SimpleNamespace(engines_by_name={"0": view}, engines=engines, scaling=None)
    monkeypatch.setattr(routes, "_fleet", lambda *_, **__: fleet)
    for call in (
        scale_replicas(ScaleReplicasRequest(num_replicas=2), None),
        restart_replicas(RestartReplicasRequest(), None),
    ):
        with pytest.raises(answered, match=says):
            asyncio.run(call)


def test_a_restart_of_all_passes_over_what_can_not_be_restarted(monkeypatch) -> None:
    engines_by_name = {name: SimpleNamespace(state=EngineState.READY) for name in "abcd"}
    engines_by_name["b"].state = EngineState.FAILED
    restarted = []

    async def restart(name: str, timeout_s: float) -> None:
        restarted.append(name)
        engines_by_name.pop("c", None)  # somebody else has ended it

    engines = SimpleNamespace(restart=restart)
    fleet = SimpleNamespace(engines_by_name=engines_by_name, engines=engines, scaling=None)
    monkeypatch.setattr(routes, "_fleet", lambda *_, **__: fleet)
    answer = asyncio.run(restart_replicas(RestartReplicasRequest(), None))
    skipped = {"b": "it has failed for good", "c": "it was ended meanwhile"}
    assert answer == {"restarted": ["a", "d"], "skipped": skipped} and restarted == ["a", "d"]


def test_a_number_that_scaling_by_load_would_undo_is_refused(monkeypatch) -> None:
    fleet = SimpleNamespace(scaling=ScalingConfig(1, 3, wait_s=1.0))
    monkeypatch.setattr(routes, "_fleet", lambda *_, **__: fleet)
    with pytest.raises(InvalidRequestError, match="autoscaling keeps it from 1 to 3"):
        asyncio.run(scale_replicas(ScaleReplicasRequest(num_replicas=4), None))


def test_replicas_may_go_while_metrics_are_gathered(monkeypatch) -> None:
    async def stats(timeout_s: float) -> None:
        engines_by_name.pop("b", None)
        raise EngineDeadError("it is gone")

    view = SimpleNamespace(
        state=EngineState.READY,
        num_restarts=0,
        last_step_age_s=0.0,
        pid=None,
        stats=stats,
        facts={},
    )
    engines_by_name = {"a": view, "b": view}
    service = SimpleNamespace(
        model_name="m",
        metrics_names="both",
        engine=SimpleNamespace(
            engines_by_name=engines_by_name,
            engines=SimpleNamespace(overview=dict),
            dispatcher=SimpleNamespace(num_moved=0, num_blamed=0),
        ),
        monitor=None,
        tenants=SimpleNamespace(num_open=lambda: 0),
        connections=OpenConnections(),
        bodies=BodyBudget(),
        model_names=("m",),
        created_s=0,
    )
    models = ServedModels.of(service)
    monkeypatch.setattr(metrics, "models_of", lambda http: models)
    for name in ("api_server_families", "generation_families"):
        monkeypatch.setattr(metrics, name, lambda *arguments: [])
    answer = asyncio.run(metrics.metrics(SimpleNamespace(headers={})))
    assert b'replica="a"' in answer.body and b'replica="b"' in answer.body
