"""GET /health, /live and /ready: the liveness and readiness of this server.

A supervisor that restarts servers calls /health or /live: 200 while the API server lives and the
engine works or can recover by itself. A load balancer calls /ready: 200 only while the engine takes
steps and new requests are accepted. None of them needs a key, because probes of Kubernetes can't
read one from a Secret. The operator also gets the reason, and /health adds numbers of the whole
server; only these numbers wait for the engine.
"""

from typing import Any

from starlette.requests import Request as HTTPRequest

from quire.engine_client.fleet import EngineFleet
from quire.engine_client.recovery import EngineState
from quire.errors import EngineDeadError, QuireError
from quire.server.routes.endpoint import Endpoints
from quire.server.routes.openapi import ERROR_RESPONSES
from quire.server.served_models import ServedModels, models_of
from quire.server.service import Service

router = Endpoints(
    is_suggested=False,
    open_paths=("/health", "/live", "/ready"),  # without details, since probes have no key
    probes=("/health", "/live", "/ready"),
    responses=ERROR_RESPONSES,
)

ENGINE_TIMEOUT_S = 10.0
"""Maximum seconds for which other endpoints wait for the engine, which answers between steps."""

DETAILS_TIMEOUT_S = 2.0
"""Maximum seconds for which /health waits for the engine's numbers; then it omits them."""

_NOT_READY = {
    EngineState.STARTING: "the model is being loaded",
    EngineState.ASLEEP: "the engine sleeps",
    EngineState.RECOVERING: "the engine has died and is being started again",
    EngineState.FAILED: "the engine can't be started any more",
    EngineState.CLOSING: "the server is about to end",
}


class NotReadyError(QuireError):
    """The server lives, but takes no requests at the moment."""

    http_status = 503
    code = "not_ready"
    retry_after_s = 1.0


@router.route("/health", "GET", "HEAD")
async def health(http: HTTPRequest) -> dict[str, Any]:
    """Whether the server lives. Raises EngineDeadError, which is 503, once the engine has failed
    for good.

    The operator also gets `engine`, the engine's counts, or null while the engine does not answer;
    `num_open`, the number of open generations of all clients; `num_restarts`; and `replicas`, their
    states, if the server has replicas. Clients only get the status, since these numbers change with
    the calls of other clients. A server of several models is healthy while it answers; the operator
    gets these numbers of each model, by name, in `models`.
    """
    models = models_of(http)
    if models.room is not None:
        return {"status": "ok", **(await _models(models) if http.state.is_operator else {})}
    engine = models.default_service.engine
    _check_alive(engine)
    status = "ok" if engine.state is EngineState.READY else engine.state.value
    if not http.state.is_operator:
        return {"status": status}
    return {"status": status, **await _numbers(engine)}


async def _models(models: ServedModels) -> dict[str, Any]:
    """The states and numbers of several models."""
    found: dict[str, dict[str, Any]] = {}
    for model in models.all:
        found[model.name] = model.report()
        if (fleet := model.fleet) is not None:
            found[model.name] |= await _numbers(fleet)
    return {"models": found}


async def _numbers(engine: EngineFleet) -> dict[str, Any]:
    """The numbers of a model for the operator."""
    found: dict[str, Any] = {
        "engine": await _details(engine),
        "num_open": engine.num_open,
        "num_restarts": engine.num_restarts,
    }
    if named := {name: each for name, each in engine.engines_by_name.items() if name}:
        found["replicas"] = {name: each.state.value for name, each in named.items()}
    return found


@router.route("/live", "GET", "HEAD")
async def live(http: HTTPRequest) -> dict[str, str]:
    """Whether the server lives. Raises EngineDeadError, which is 503, once the only model's engine
    has failed for good."""
    models = models_of(http)
    if models.room is None:
        _check_alive(models.default_service.engine)
    return {"status": "live"}


@router.route("/ready", "GET", "HEAD")
async def ready(http: HTTPRequest) -> dict[str, str]:
    """Whether to send requests here. Raises NotReadyError, which is 503; the operator gets the
    reason."""
    models = models_of(http)
    is_one = models.room is None
    reason = why_not_ready(models.default_service) if is_one else _why_models_not_ready(models)
    if reason is not None:
        raise NotReadyError(f"not ready: {reason}" if http.state.is_operator else "not ready")
    is_asleep = is_one and models.default_service.engine.state is EngineState.ASLEEP
    return {"status": "asleep" if is_asleep else "ready"}


def _check_alive(engine: EngineFleet) -> None:
    if engine.state is EngineState.FAILED:
        raise EngineDeadError(f"{_NOT_READY[EngineState.FAILED]}; the server's log says why")


def why_not_ready(service: Service) -> str | None:
    """The reason to send no requests here now; None if requests are accepted."""
    if service.drain.is_on:
        return _NOT_READY[EngineState.CLOSING]
    state = service.engine.state
    # The next request wakes this engine, so a load balancer must not keep requests away.
    if state is EngineState.ASLEEP and service.engine.sleeping.on_wanted is not None:
        return None
    return _NOT_READY.get(state)


def _why_models_not_ready(models: ServedModels) -> str | None:
    """The reason why a server of several models is not ready; None if it is. It is ready once each
    pinned model has been loaded, or has failed."""
    if models.shared.drain.is_on:
        return _NOT_READY[EngineState.CLOSING]
    for model in models.all:
        if model.is_pinned and not model.num_loads and model.failure is None:
            return f"the model {model.name} is being loaded"
    return None


async def _details(engine: EngineFleet) -> dict[str, Any] | None:
    """The fields of EngineStats by name, without the histograms, which are for /metrics."""
    try:
        stats = await engine.stats(DETAILS_TIMEOUT_S)
    except QuireError:
        return None  # the engine recovers, or its step takes long
    return {name: value for name, value in stats.items() if name != "times"}
