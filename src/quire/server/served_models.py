"""All models of a server, and which of them a call uses.

A server has one model, or several that are loaded when calls name them (`model_room`). A route gets
the service of its call from `service.service_of`, and all models from `models_of`. Imports no
torch.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from starlette.requests import Request as HTTPRequest
from starlette.types import Scope

from quire.errors import InvalidRequestError, QuireError
from quire.server.adapter_names import ANY_MODEL
from quire.server.hosted_model import HostedModel, ModelLoadError, Phase
from quire.server.http.streaming import unless_disconnected
from quire.server.model_room import ModelRoom
from quire.server.service import END_S, Service, SharedState, UnknownModelError, service_of
from quire.server.tenants.tenants import NO_TENANT, Tenant

LOG_SAYS_WHY = "the model could not be loaded; the server's log says why"
"""The error for tenants, since the reason may name files of the operator."""


class ServedModels:
    """All models of a server. Invariant: no name belongs to two models."""

    def __init__(
        self,
        shared: SharedState,
        models: Sequence[HostedModel],
        room: ModelRoom | None,
        start_lines: Sequence[str] = (),
    ) -> None:
        """The first model answers calls that name none. `room` is None if there is one model, which
        is in memory as long as the server runs. The server prints `start_lines` when it begins to
        serve."""
        self.shared = shared
        self.all = tuple(models)
        self.room = room
        self.start_lines = start_lines

    @classmethod
    def of(cls, service: Service, start_lines: Sequence[str] = ()) -> Self:
        """The only model of a server, which is in memory."""
        only = HostedModel(
            service.model_names,
            phase=Phase.LOADED,
            service=service,
            created_s=service.created_s,
        )
        return cls(service, [only], None, start_lines)

    @property
    def default(self) -> HostedModel:
        """The model of calls that name none."""
        return self.all[0]

    @property
    def default_service(self) -> Service:
        """The service of the first model. Raises ModelNotLoadedError."""
        return self.default.loaded_service

    def unnamed_service(self, tenant: Tenant) -> Service:
        """See `ModelChoice`. Raises UnknownModelError, ModelNotLoadedError."""
        return self.find(None, tenant).loaded_service

    @property
    def has_chat(self) -> bool:
        """Whether the default model has a chat template, as far as that is known."""
        service = self.default.service
        return service is None or service.chat_template.exists

    @property
    def services(self) -> Iterator[Service]:
        """The services of the models that have been loaded at least once."""
        return (model.service for model in self.all if model.service is not None)

    def visible_to(self, tenant: Tenant) -> list[HostedModel]:
        """The models that a tenant may use."""
        return [model for model in self.all if tenant.may_use(model.names)]

    def find(self, name: Any, tenant: Tenant) -> HostedModel:
        """The model that is called `name`, or has an adapter of this name; None means the first
        that the tenant may use. Raises UnknownModelError, InvalidRequestError if it is no text."""
        if name is not None and not isinstance(name, str):
            raise InvalidRequestError("model must be a text", "model")
        visible = self.visible_to(tenant)
        # A server's only model is returned for any name. `Service.check_model` refuses a wrong name
        # after the other fields of the body have been checked.
        if self.room is None and visible:
            return visible[0]
        for model in visible:
            if name in (None, ANY_MODEL) or name in model.names or name in model.adapter_names:
                return model
        raise UnknownModelError.of(name, [each for model in visible for each in model.names])

    async def enter(self, http: HTTPRequest, model: HostedModel) -> None:
        """Wait until a call's model is in memory; `leave` must follow. Raises the errors of
        `ModelRoom.enter`, ServerDrainingError, ClientGoneError."""
        state = http.scope.setdefault("state", {})
        is_background = _is_background(state)
        if self.room is not None and not self.room.try_enter(model, is_background=is_background):
            self.shared.check_accepting()
            await self._wait(http, self.room, model)
        state["entered"], state["service"] = model, model.service

    async def _wait(self, http: HTTPRequest, room: ModelRoom, model: HostedModel) -> None:
        state, has_entered = http.scope["state"], False

        async def enter() -> None:
            nonlocal has_entered
            await room.enter(model, is_background=_is_background(state))
            has_entered = True

        # A waiting call counts as an open generation of its tenant.
        lease = self.shared.tenants.open(state.get("tenant", NO_TENANT), 1, 0)
        try:
            await unless_disconnected(http.receive, enter())
        except BaseException as error:
            if has_entered:  # the call was cancelled in the moment in which it was admitted
                room.leave(model, is_background=_is_background(state))
            if isinstance(error, ModelLoadError) and not state.get("is_operator"):
                raise ModelLoadError(LOG_SAYS_WHY, error.retry_after_s) from error
            raise
        finally:
            lease.close()

    def leave(self, scope: Scope) -> None:
        """End a call. Does nothing if it has not entered a model."""
        state = scope.get("state", {})
        model: HostedModel | None = state.pop("entered", None)
        if model is not None and self.room is not None:
            self.room.leave(model, is_background=_is_background(state))

    async def end(self, reason: QuireError) -> None:
        """End all engines; open streams end with `reason`."""
        for model in self.all:
            model.refuse_waiting(lambda: reason)
        for service in self.services:
            service.grammars.end(reason)
        ending = [
            service.engine.shutdown(drain=False, timeout_s=END_S, reason=reason)
            for service in self.services
        ]
        await asyncio.gather(*ending)

    async def wait_failed(self) -> QuireError:
        """Wait until the only model has failed for good; each of several models fails alone, so
        this waits forever."""
        if self.room is None:
            return await self.default_service.engine.wait_failed()
        never: asyncio.Future[QuireError] = asyncio.get_running_loop().create_future()
        return await never


def _is_background(state: Mapping[str, Any]) -> bool:
    """Whether a call with this state belongs to a batch."""
    return "added_priority" in state


def models_of(http: HTTPRequest) -> ServedModels:
    """The models that were given to `create_app`."""
    models: ServedModels = http.app.state.models
    return models


def caller_of(http: HTTPRequest) -> Tenant:
    """The tenant of a call."""
    tenant: Tenant = http.scope.get("state", {}).get("tenant", NO_TENANT)
    return tenant


def visible_models(http: HTTPRequest) -> list[HostedModel]:
    """The models that the caller may use."""
    return models_of(http).visible_to(caller_of(http))


def find_model(http: HTTPRequest, name: str | None) -> HostedModel:
    """The model that is called `name`, or has an adapter of this name, whether it is in memory or
    not; None means the first. Raises UnknownModelError."""
    models = models_of(http)
    if models.room is None:
        models.default_service.check_model(name)
    return models.find(name, caller_of(http))


def service_named(http: HTTPRequest, name: str | None) -> Service:
    """The service of the model in the query of a call; None means the first that the caller may
    use. Raises UnknownModelError, ModelNotLoadedError."""
    if name is None:
        return service_of(http)
    return find_model(http, name).loaded_service
