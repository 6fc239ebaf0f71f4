"""GET /replicas, POST /replicas/restart and /replicas/scale: the fleet, for the operator.

Restarting and scaling end no stream: the streams of a replica that ends continue in another
replica, with the same tokens, after a pause.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from starlette.requests import Request as HTTPRequest

from quire.engine_client.engine_slot import ONLY_ENGINE
from quire.engine_client.fleet import EngineFleet
from quire.engine_client.recovery import EngineState
from quire.errors import ConfigurationError, EngineDeadError, InvalidRequestError
from quire.server.http.body import Body
from quire.server.routes.endpoint import Endpoints
from quire.server.routes.openapi import ERROR_RESPONSES
from quire.server.served_models import models_of, service_named

RESTART, SCALE = "/replicas/restart", "/replicas/scale"
MAX_TIMEOUT_S = 3600.0
MAX_REPLICAS = 10_000

router = Endpoints(is_suggested=False, operator_paths=("/replicas",), responses=ERROR_RESPONSES)


class RestartReplicasRequest(Body):
    """The body of POST /replicas/restart."""

    notes: ClassVar[Mapping[str, str]] = {
        "replica": "the replica to restart; if left out, all are restarted, one after the other",
        "timeout_s": "seconds for which its open streams may continue before they move elsewhere",
    }

    replica: str | None = None
    timeout_s: float = 0.0


class ScaleReplicasRequest(Body):
    """The body of POST /replicas/scale."""

    notes: ClassVar[Mapping[str, str]] = {"num_replicas": "the number of replicas to run"}

    num_replicas: int


@router.get("/replicas")
async def replicas(http: HTTPRequest, model: str | None = None) -> dict[str, Any]:
    """Each replica's state, process, restarts, and open work according to the router.

    `model` names one of several models. Raises InvalidRequestError for a model of a single engine.
    """
    return {"replicas": _fleet(http, model).engines.overview()}


@router.post(RESTART)
async def restart_replicas(
    body: RestartReplicasRequest, http: HTTPRequest, model: str | None = None
) -> dict[str, Any]:
    """Restart the named replica, or else all in sequence; answers when the replicas are ready."""
    fleet = _fleet(http, model)
    if not 0 <= body.timeout_s <= MAX_TIMEOUT_S:
        raise InvalidRequestError(
            f"timeout_s is {body.timeout_s}, but must be from 0 to {MAX_TIMEOUT_S:g}", "timeout_s"
        )
    restarted: list[str] = []
    skipped: dict[str, str] = {}
    names = list(fleet.engines_by_name) if body.replica is None else [_known(fleet, body.replica)]
    with _explained_to_operator():
        for name in names:
            if body.replica is None and (why := _why_not_restarted(fleet, name)):
                skipped[name] = why
                continue
            await fleet.engines.restart(name, body.timeout_s)
            restarted.append(name)
    return {"restarted": restarted, "skipped": skipped}


def _why_not_restarted(fleet: EngineFleet, name: str) -> str | None:
    """The reason to skip a replica when all are restarted: it has ended, or has failed for good."""
    engine = fleet.engines_by_name.get(name)
    if engine is None:
        return "it was ended meanwhile"
    return "it has failed for good" if engine.state is EngineState.FAILED else None


@router.post(SCALE)
async def scale_replicas(
    body: ScaleReplicasRequest, http: HTTPRequest, model: str | None = None
) -> dict[str, Any]:
    """Start or end replicas; answers when the requested number runs."""
    fleet = _fleet(http, model, changes_number=True)
    if not 1 <= body.num_replicas <= MAX_REPLICAS:
        raise InvalidRequestError(
            f"num_replicas is {body.num_replicas}, but must be from 1 to {MAX_REPLICAS}",
            "num_replicas",
        )
    with _explained_to_operator():
        if fleet.scaling is not None:
            fleet.scaling.check(body.num_replicas)
        await fleet.engines.scale(body.num_replicas)
    return {"replicas": fleet.engines.overview()}


@contextlib.contextmanager
def _explained_to_operator() -> Iterator[None]:
    """Replace errors whose reason is hidden from clients by errors with the reason, since only the
    operator calls these endpoints."""
    try:
        yield
    except ConfigurationError as error:
        raise InvalidRequestError(str(error)) from error
    except OSError as error:
        raise EngineDeadError(f"a replica could not be started: {error}") from error


def _fleet(http: HTTPRequest, model: str | None, *, changes_number: bool = False) -> EngineFleet:
    if changes_number and models_of(http).room is not None:
        raise InvalidRequestError(
            "each of several models has a fixed number of replicas; set replicas in the file of"
            " models"
        )
    fleet = service_named(http, model).engine
    if ONLY_ENGINE in fleet.engines_by_name:
        raise InvalidRequestError(
            "this server has one engine and no replicas; start it with --replicas, --agents or"
            " --ray-address"
        )
    return fleet


def _known(fleet: EngineFleet, name: str) -> str:
    if name not in fleet.engines_by_name:
        raise InvalidRequestError(
            f"replica is {name!r:.40}, but there are: {', '.join(fleet.engines_by_name)}", "replica"
        )
    return name
