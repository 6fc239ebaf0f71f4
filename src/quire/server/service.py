"""The `Service` object with everything that HTTP handlers need: engine, tokenizer, limits, tenants.

Made by `model_launch`, read by `generation` and the routes. Imports no torch.
"""

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, Self

from starlette.requests import Request as HTTPRequest

from quire.engine_client.fleet import EngineFleet
from quire.errors import InvalidRequestError, QuireError, ServerDrainingError
from quire.images.reader import ImageReader
from quire.server.adapter_names import ANY_MODEL, AdapterNames
from quire.server.batch.batch_book import BatchBook
from quire.server.config import KEEP_ALIVE_S
from quire.server.generation.answer_defaults import AnswerDefaults
from quire.server.generation.answer_store import AnswerStore
from quire.server.generation.grammar_checks import GrammarChecks
from quire.server.generation.seeds import Seeds
from quire.server.http.body import UnknownFields
from quire.server.http.body_budget import BodyBudget, ParseTurns
from quire.server.http.long_work import WorkPieces
from quire.server.http.open_connections import OpenConnections
from quire.server.idle_unload import IdleUnload
from quire.server.limits import CallLimits
from quire.server.model_store import ModelStore
from quire.server.stats.live_feed import LiveFeed
from quire.server.telemetry.monitor import Monitor
from quire.server.tenants.tenants import NO_TENANT, Tenant, TenantBook
from quire.text.chat_template import ChatTemplate
from quire.text.parsers.dialect import Dialect
from quire.text.parsers.dialect_choice import find_dialect
from quire.text.tokenizer import Tokenizer

DRAIN_RETRY_AFTER_S = 5.0
"""The Retry-After, in seconds, of calls that are refused while the server shuts down. By then
another server, or this one after a restart, may answer."""

END_S = 5.0
"""Seconds in which an engine that is ended may end by itself."""

_ANY_MODEL = (None, ANY_MODEL)
"""Values of the field `model` that refer to the served model."""


class UnknownModelError(QuireError):
    """The request names a model that is not served here."""

    http_status = 404
    code = "model_not_found"
    param = "model"

    @classmethod
    def of(cls, name: str | None, served: Iterable[str]) -> Self:
        """The error for `name`; `served` are the names that the caller may use."""
        names = ", ".join(map(repr, served)) or "none that this key may use"
        return cls(
            f"the model {name!r:.80} is not served here; this server has {names:.400}"
            " (see /v1/models)"
        )


class Drain:
    """Records whether the server is shutting down: open answers finish, new calls are refused.

    Invariant: once it is on, it stays on.
    """

    def __init__(self) -> None:
        self._is_on = False

    @property
    def is_on(self) -> bool:
        return self._is_on

    def begin(self) -> None:
        """Make `check_accepting` refuse from now on. May be called twice."""
        self._is_on = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedState:
    """The state that all models of a server share: bounds, records, tenants, stored answers."""

    #: Bounds of one call.
    limits: CallLimits = field(default_factory=CallLimits)
    #: Bounds of each tenant, with its open generations and used tokens.
    tenants: TenantBook = field(default_factory=TenantBook)
    #: Records every call in the log, the metrics and the spans.
    monitor: Monitor = field(default_factory=Monitor)
    #: Seconds between keep-alive comments in a stream without output.
    keep_alive_s: float = KEEP_ALIVE_S
    #: Seconds until calls without `deadline_s` end with an error; None means no limit.
    default_deadline_s: float | None = None
    #: Handling of unknown fields in a body; None means that each API has its own default.
    unknown_fields: UnknownFields | None = None
    #: Fetches and removes models of this machine; None if that is not allowed.
    model_store: ModelStore | None = None
    drain: Drain = field(default_factory=Drain)
    #: Runs the slow parts of large calls without blocking the event loop.
    work: WorkPieces = field(default_factory=WorkPieces)
    #: Stored answers, which later calls can continue.
    answers: AnswerStore = field(default_factory=AnswerStore)
    #: Batches that are answered in the background; None without a folder for them.
    batches: BatchBook | None = None
    #: Names of the metrics; see `ServerConfig`.
    metrics_names: str = "both"
    #: Whether there is a page at `/`.
    has_page: bool = True
    #: Connections that clients have open.
    connections: OpenConnections = field(default_factory=OpenConnections)
    #: Bounds the bytes of the bodies of open calls.
    bodies: BodyBudget = field(default_factory=BodyBudget)
    #: Bounds the number of long bodies that are parsed at once.
    parsing: ParseTurns = field(default_factory=ParseTurns)
    #: Snapshots of the engines of all models for the operator, and their open streams.
    feed: LiveFeed = field(default_factory=LiveFeed)

    def report_or_refuse_fields(self, http: HTTPRequest, labels: Collection[str]) -> None:
        """Report nested fields of the body that have no effect in a header of the answer. Raises
        InvalidRequestError instead if the server is configured to refuse unknown fields."""
        if self.unknown_fields == "refuse":
            for name in labels:
                raise InvalidRequestError(
                    f"unknown field {name!r:.80}; leave it out", name.partition(".")[0]
                )
        report_ignored_fields(http, labels)

    def check_accepting(self) -> None:
        """Raises ServerDrainingError once the server is shutting down."""
        if self.drain.is_on:
            raise ServerDrainingError(
                "the server is ending and takes no new calls; retry, here or at another server",
                DRAIN_RETRY_AFTER_S,
            )

    def as_mapping(self) -> dict[str, Any]:
        """The fields of this class by name, for the `Service` of a model."""
        return {each.name: getattr(self, each.name) for each in fields(SharedState)}


@dataclass(frozen=True, slots=True)
class Service(SharedState):
    """One served model with everything that its calls share."""

    engine: EngineFleet
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    #: Main name of the model, which logs and metrics use.
    model_name: str
    #: Draws a seed for each request without a seed.
    seeds: Seeds = field(default_factory=Seeds)
    created_s: int = field(default_factory=lambda: int(time.time()))
    #: Whether text in messages that spells a special token is encoded as this token.
    allow_special_tokens: bool = False
    #: Fields of the tokenizer's configuration in the model's folder.
    tokenizer_fields: Mapping[str, Any] = field(default_factory=dict)
    #: Value of OpenAI's `system_fingerprint`: names the settings that influence the answers.
    system_fingerprint: str | None = None
    #: Puts the idle engine to sleep; None if it stays awake.
    idle_unload: IdleUnload | None = None
    #: Compiles the grammars that answers must obey.
    grammars: GrammarChecks = field(default_factory=GrammarChecks)
    #: The markup that the model writes around reasoning and tool calls.
    dialect: Dialect = field(default_factory=lambda: find_dialect(None))
    #: Variables of the chat template for calls that set none.
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    #: Further names under which the model is served.
    other_names: tuple[str, ...] = ()
    #: The operator's settings that change the answers to all calls.
    answer_defaults: AnswerDefaults = field(default_factory=AnswerDefaults)
    #: Reads the images of prompts; None for models that take text only.
    images: ImageReader | None = None
    #: Adapters that calls may name as their model.
    adapters: AdapterNames = field(default_factory=AdapterNames)

    @property
    def image_reader(self) -> ImageReader | None:
        """Reads the images of prompts; None if the engine or the operator takes none."""
        reader = self.images
        is_limited = reader is not None and not (reader.max_images or reader.max_videos)
        if reader is None or is_limited or not self.engine.limits.max_content_tokens:
            return None
        return reader

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names under which the model is served; logs and metrics use the first."""
        return (self.model_name, *self.other_names)

    def answered_name(self, name: str | None) -> str:
        """The model's name in an answer to a call that asked for `name`."""
        return self.model_name if name in _ANY_MODEL else name

    def check_model(self, name: str | None) -> None:
        """Raises UnknownModelError if `name` is neither a name of the model nor of an adapter. None
        means the model."""
        if name not in _ANY_MODEL and name not in self.model_names and name not in self.adapters:
            raise UnknownModelError.of(name, self.model_names)


class ModelChoice(Protocol):
    """The part of `ServedModels` that `service_of` reads."""

    def unnamed_service(self, tenant: Tenant) -> Service:
        """The service of a tenant's calls that name no model."""
        ...


def service_of(http: HTTPRequest) -> Service:
    """The service of the model that the call's body names, or else of the first model that the
    caller may use. Raises UnknownModelError if it may use none, ModelNotLoadedError if the model is
    not in memory."""
    models: ModelChoice = http.app.state.models
    state = http.scope.get("state", {})
    return state.get("service") or models.unnamed_service(state.get("tenant", NO_TENANT))


def report_ignored_fields(http: HTTPRequest, names: Iterable[str]) -> None:
    """Report these fields of the body, which have no effect, in a header of the answer."""
    http.scope.setdefault("state", {}).setdefault("ignored_fields", []).extend(names)
