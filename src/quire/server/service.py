"""What every HTTP handler needs: engine, tokenizer, limits, tenants.

Made by `launch`, read by `generation` and the routes. Imports no torch.
"""

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from fastapi import Request as HTTPRequest

from quire.engine_client.views import ServedEngine
from quire.errors import InvalidRequestError, QuireError, ServerDrainingError
from quire.server.adapter_names import ANY_MODEL, AdapterNames
from quire.server.config import KEEP_ALIVE_S
from quire.server.generation.answer_defaults import AnswerDefaults
from quire.server.generation.answer_store import AnswerStore
from quire.server.generation.grammar_checks import GrammarChecks
from quire.server.generation.seeds import Seeds
from quire.server.http.body import UnknownFields
from quire.server.http.body_budget import BodyBudget, ParseTurns
from quire.server.http.long_work import WorkPieces
from quire.server.http.open_connections import OpenConnections
from quire.server.limits import CallLimits
from quire.server.telemetry.monitor import Monitor
from quire.server.tenants.tenants import TenantBook
from quire.text.chat_template import ChatTemplate
from quire.text.parsers.dialect import Dialect
from quire.text.parsers.dialect_choice import find_dialect
from quire.text.tokenizer import Tokenizer

DRAIN_RETRY_AFTER_S = 5.0
"""Of calls that are refused while the server ends: another server, or the next one on this address,
may be there by then."""


_ANY_MODEL = (None, ANY_MODEL)
"""For the one model there is."""


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
    unknown_fields: what happens to fields of a body that nobody knows; None: as its API has it.
    tokenizer_fields: what the model's folder says of its tokenizer.
    other_names: under which the model is served, too; see `model_names`. adapters: what else calls
    may name as their model.
    system_fingerprint: what the numbers of an answer depend on, in OpenAI's field. work: does
    what takes long because a call is large. grammars: compiles what answers must obey. answers:
    those that are kept for later calls.
    dialect: what the model writes around reasoning and tool calls. default_chat_template_kwargs:
    of calls that have no others. answer_defaults: what every answer has.
    connections: those that clients have open. bodies: the bytes of the bodies of open calls.
    parsing: lets few long bodies be parsed at once.
    """

    engine: ServedEngine
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
    unknown_fields: UnknownFields | None = None
    tokenizer_fields: Mapping[str, Any] = field(default_factory=dict)
    system_fingerprint: str | None = None
    drain: Drain = field(default_factory=Drain)
    work: WorkPieces = field(default_factory=WorkPieces)
    answers: AnswerStore = field(default_factory=AnswerStore)
    grammars: GrammarChecks = field(default_factory=GrammarChecks)
    dialect: Dialect = field(default_factory=lambda: find_dialect(None))
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    other_names: tuple[str, ...] = ()
    answer_defaults: AnswerDefaults = field(default_factory=AnswerDefaults)
    adapters: AdapterNames = field(default_factory=AdapterNames)
    connections: OpenConnections = field(default_factory=OpenConnections)
    bodies: BodyBudget = field(default_factory=BodyBudget)
    parsing: ParseTurns = field(default_factory=ParseTurns)

    @property
    def model_names(self) -> tuple[str, ...]:
        """All under which the model is served; the first is that of logs and metrics."""
        return (self.model_name, *self.other_names)

    def answered_name(self, name: str | None) -> str:
        """The model's name in an answer to a call that asked for `name`."""
        return self.model_name if name in _ANY_MODEL else name

    def check_model(self, name: str | None) -> None:
        """Raises UnknownModelError unless `name` is one of the served model's or of its adapters',
        or left out."""
        if name not in _ANY_MODEL and name not in self.model_names and name not in self.adapters:
            names = ", ".join(map(repr, self.model_names))
            raise UnknownModelError(
                f"the model {name!r:.80} is not served here; this server has {names:.400}"
                " (see /v1/models)"
            )

    def leave_out(self, http: HTTPRequest, labels: Collection[str]) -> None:
        """Have the answer name fields inside of the body that say nothing; or refuse them, with
        InvalidRequestError, where the operator refuses what nobody knows."""
        if self.unknown_fields == "refuse":
            for name in labels:
                raise InvalidRequestError(
                    f"unknown field {name!r:.80}; leave it out", name.partition(".")[0]
                )
        note_ignored(http, labels)

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


def note_ignored(http: HTTPRequest, names: Iterable[str]) -> None:
    """Have the answer name these fields of the body, which change nothing in it."""
    http.scope.setdefault("state", {}).setdefault("ignored_fields", []).extend(names)
