"""What every HTTP handler needs: engine, tokenizer, limits, tenants.

Made by `launch`, read by `generation` and the routes. Imports no torch.
"""

import time
from dataclasses import dataclass, field
from typing import cast

from fastapi import Request as HTTPRequest

from quire.engine_client.async_engine import AsyncEngine
from quire.errors import QuireError, ServerDrainingError
from quire.server.config import KEEP_ALIVE_S
from quire.server.generation.seeds import Seeds
from quire.server.http.long_work import WorkPieces
from quire.server.limits import CallLimits
from quire.server.telemetry.monitor import Monitor
from quire.server.tenants.tenants import TenantBook
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import Tokenizer

DRAIN_RETRY_AFTER_S = 5.0
"""Of calls that are refused while the server ends: another server, or the next one on this address,
may be there by then."""


class UnknownModelError(QuireError):
    """The request names a model that is not served here."""

    http_status = 404
    code = "model_not_found"
    param = "model"


class Drain:
    """Whether the server is ending: open answers go on, new calls are refused.

    Invariant: once it is on, it stays on.
    """

    def __init__(self) -> None:
        self._is_on = False

    @property
    def is_on(self) -> bool:
        return self._is_on

    def begin(self) -> None:
        """From now on `check_accepting` refuses. May be called twice."""
        self._is_on = True


@dataclass(frozen=True, slots=True)
class Service:
    """One served model.

    seeds: draws the seed of each request that brings none. limits: of one call. tenants: what
    each has open. monitor: counts every call. keep_alive_s: a stream without output gets a comment
    so often. default_deadline_s: of calls that name none; None: no deadline.
    allow_special_tokens: those that are written out in messages take effect.
    system_fingerprint: what the numbers of an answer depend on, in OpenAI's field. work: does
    what takes long because a call is large.
    """

    engine: AsyncEngine
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    model_name: str
    seeds: Seeds = field(default_factory=Seeds)
    created_s: int = field(default_factory=lambda: int(time.time()))
    limits: CallLimits = field(default_factory=CallLimits)
    tenants: TenantBook = field(default_factory=TenantBook)
    monitor: Monitor = field(default_factory=Monitor)
    keep_alive_s: float = KEEP_ALIVE_S
    default_deadline_s: float | None = None
    allow_special_tokens: bool = False
    system_fingerprint: str | None = None
    drain: Drain = field(default_factory=Drain)
    work: WorkPieces = field(default_factory=WorkPieces)

    def check_model(self, name: str | None) -> None:
        """Raises UnknownModelError unless `name` is the served model, or left out."""
        if name is not None and name != self.model_name:
            raise UnknownModelError(
                f"the model {name!r:.80} is not served here; this server has {self.model_name!r} "
                "(see /v1/models)"
            )

    def check_accepting(self) -> None:
        """Raises ServerDrainingError once the server is ending."""
        if self.drain.is_on:
            raise ServerDrainingError(
                "the server is ending and takes no new calls; retry, here or at another server",
                DRAIN_RETRY_AFTER_S,
            )


def service_of(http: HTTPRequest) -> Service:
    """The service that `create_app` was given."""
    return cast(Service, http.app.state.service)
