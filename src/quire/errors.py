"""The exception tree: every error a user can meet, with its HTTP status.

QuireError                      500
├── InvalidRequestError         400  a request that can't be served as asked (also a ValueError)
│   ├── PromptTooLongError      400  the prompt leaves no room for a token within max_model_len
│   ├── NoTokenLeftError        422  its options exclude every token that could come next
│   ├── GrammarTooComplexError  422  its grammar outgrew the limits in the middle of the answer
│   └── RequestNeverFitsError   422  valid, but needs more KV blocks than the whole pool has
├── AuthenticationError         401  no API key, or none that the server knows
├── OperatorOnlyError           403  the whole server's numbers, asked for by a tenant
├── RequestTimeoutError         408  the request's body does not come
├── DeadlineExceededError       408  the request's own deadline passed before its answer was whole
├── BodyTooLongError            413  the request's body is longer than the server takes
├── ConfigurationError          500  an engine option that can't be obeyed (also a ValueError)
│   ├── UnsupportedModelError   500  an architecture or config field that is not understood
│   ├── CheckpointError         500  a model folder that can't be read: missing, corrupt, pickled
│   ├── InsufficientMemoryError 500  not enough memory for what the options ask
│   └── ReplicaDiffersError     500  an engine that computes something else than its fleet
├── AdapterError                400  an adapter that can't be read, or that the model can't have
├── OverloadedError             429  a bounded queue is full; `retry_after_s` says when to retry
│   ├── TenantBusyError         429  the tenant has as much under way as it may
│   └── TokenRateError          429  the tenant has used up its tokens per minute
├── EngineDeadError             503  the engine process is gone or shutting down
├── ServerDrainingError         503  the server is about to end and takes no more requests
├── UploadsFullError            503  the bodies of all calls take as much memory as they may
├── ExhaustedError              503  the system has no memory or no file descriptor left for it
├── NoReplicaError              503  no replica of the fleet takes requests now
├── RequestKillsEngineError     500  the engine died twice on this request's trial
├── StepFailedError             500  a forward pass failed; ends the requests that were in it
└── SchedulerStalledError       500  a step can make no progress: a bug, never a user's mistake
"""

import difflib
import re
import reprlib
from collections.abc import Iterable, Mapping

_SURROGATE = re.compile("[\ud800-\udfff]")


_MAX_NAME_CHARACTERS = 64
"""Of an unknown name; what is longer is no misspelling, and slow to compare."""

_LEAST_LIKENESS = 0.8
_LEAST_LIKENESS_OF_EQUAL_LENGTH = 0.75  # one letter of four, or two that changed places


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the known name that `name` misspells or shortens; "" where there is
    none: a suggestion of something else misleads."""
    ranked = sorted(((_likeness(name, each), each) for each in known), reverse=True)
    return f"; did you mean {ranked[0][1]}?" if ranked and ranked[0][0] > 0 else ""


def unknown_name(owner: object, name: str, advice: Mapping[str, str]) -> AttributeError:
    """What an attribute that is not there is answered with.

    advice: name -> what to use instead; another gets the nearest name of `owner`, an object.
    """
    why = f": {advice[name]}" if name in advice else ""
    if not why:
        known = [each for each in dir(type(owner)) if not each.startswith("_")]
        why = did_you_mean(name, known)
    return AttributeError(f"{type(owner).__name__} has no {name}{why}", name=name, obj=owner)


def _likeness(name: str, known: str) -> float:
    """From 0, not meant, to 1, equal but for the dashes."""
    given, other = name[:_MAX_NAME_CHARACTERS].strip("-_/"), known.strip("-_/")
    if len(given) < 3:
        return 0.0
    likeness = difflib.SequenceMatcher(None, given, other).ratio()
    words, others = (set(re.split("[-_ ]", text)) for text in (given, other))
    is_part = words < others or (others < words and len(others) > 1)
    is_equal = len(given) == len(other)
    least = _LEAST_LIKENESS_OF_EQUAL_LENGTH if is_equal else _LEAST_LIKENESS
    return likeness if is_part or likeness >= least else 0.0


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxtuple, _SHORT.maxdict = 3, 6, 6, 4
_SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 80, 40, 80


def shown(value: object) -> str:
    """A value of a file or a request, for a message: its repr, short, in one line, without control
    characters.

    No more of it is looked at than is shown, however long it is.
    """
    return " ".join(_SHORT.repr(value).split("\n"))  # an array's has several lines


class QuireError(Exception):
    """Base of all errors that quire raises on purpose.

    retry_after_s: when the same request may succeed; None: not known.
    may_be_retried: False: clients that retry by themselves are asked not to.
    ends_connection: what else the client sends there can't be read as requests.
    """

    http_status = 500
    code = "internal_error"
    retry_after_s: float | None = None
    may_be_retried = True
    ends_connection = False


class InvalidRequestError(QuireError, ValueError):
    """A request that names something impossible. `param` is the field at fault, if one is."""

    http_status = 400
    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(InvalidRequestError):
    """The prompt leaves no room for a generated token within max_model_len."""

    code = "context_length_exceeded"


class RequestNeverFitsError(InvalidRequestError):
    """The request needs more KV blocks than the pool has, however long it waits."""

    http_status = 422
    code = "request_never_fits"


class NoTokenLeftError(InvalidRequestError):
    """What the request allows and what it excludes leave no token that could come next.

    Known only at the step at which it is so: TEXT is what the sampler says then.
    """

    http_status = 422
    code = "no_token_left"
    TEXT = (
        "no token is left to generate: allowed_token_ids, bad_words, min_tokens and the grammar "
        "together exclude the whole vocabulary; relax one of them"
    )


class GrammarTooComplexError(InvalidRequestError):
    """An answer's grammar can't be followed on within its limits: the answer ends there.

    Known only at the step at which it is so: TEXT is how the sentence begins.
    """

    http_status = 422
    code = "grammar_too_complex"
    TEXT = "the grammar became too complex to follow"


class AuthenticationError(QuireError):
    """The request has no API key, or none that the server knows."""

    http_status = 401
    code = "invalid_api_key"


class OperatorOnlyError(QuireError):
    """A caller that is not the operator asks for numbers of the whole server."""

    http_status = 403
    code = "operator_only"


class RequestTimeoutError(QuireError):
    """The body of the request does not come, or comes too slowly."""

    http_status = 408
    code = "request_timeout"
    ends_connection = True  # else the rest of the body could come for ever


class DeadlineExceededError(QuireError):
    """The request's own deadline passed before its answer was whole."""

    http_status = 408
    code = "deadline_exceeded"
    may_be_retried = False


class BodyTooLongError(QuireError):
    """The body of the request is longer than the server takes."""

    http_status = 413
    code = "body_too_long"


class ConfigurationError(QuireError, ValueError):
    """An engine option, or a set of them, that can't be obeyed."""

    code = "configuration_error"


class UnsupportedModelError(ConfigurationError):
    """An architecture, or a field of its config, that quire does not understand."""

    code = "unsupported_model"


class CheckpointError(ConfigurationError):
    """A model folder or file that can't be read."""

    code = "checkpoint_error"


class InsufficientMemoryError(ConfigurationError):
    """The machine, or the given limit, has less memory than the options need."""

    code = "insufficient_memory"


class AdapterError(QuireError):
    """An adapter that can't be read, or that does not fit the model."""

    http_status = 400
    code = "adapter_error"
    may_be_retried = False
    TEXT = "adapter "
    """What its messages begin with."""


class OverloadedError(QuireError):
    """A bounded queue is full. Retry after `retry_after_s` seconds."""

    http_status = 429
    code = "overloaded"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s: float = retry_after_s


class TenantBusyError(OverloadedError):
    """The tenant has as many generations open, or as long bodies under way, as it may."""

    code = "tenant_busy"


class TokenRateError(OverloadedError):
    """The tenant has used up its tokens per minute."""

    code = "rate_limit_exceeded"


class EngineDeadError(QuireError):
    """The engine process has ended, or is ending, and takes no requests.

    rank_status: where it ended because the process of another rank did, how that one ended: its
    exit code, or minus the number of the signal.
    """

    http_status = 503
    code = "engine_dead"
    retry_after_s = 5.0
    rank_status: int | None = None


class ServerDrainingError(QuireError):
    """The server is about to end: it finishes what is open and takes no more requests."""

    http_status = 503
    code = "server_draining"

    def __init__(self, message: str, retry_after_s: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UploadsFullError(QuireError):
    """The bodies of all calls that are under way take as much memory as they may together."""

    http_status = 503
    code = "uploads_full"
    retry_after_s = 1.0


class ExhaustedError(QuireError):
    """The operating system has no memory, or no file descriptor, left for the request."""

    http_status = 503
    code = "exhausted"
    retry_after_s = 1.0


class ReplicaDiffersError(ConfigurationError):
    """An engine computes something else than the others of its fleet."""

    code = "replica_differs"


class NoReplicaError(QuireError):
    """No replica of the fleet takes requests: all are dead, starting, draining or paused."""

    http_status = 503
    code = "no_replica"
    retry_after_s = 5.0


class RequestKillsEngineError(QuireError):
    """The engine died twice while it was tried on this request, which is ended alone."""

    code = "request_kills_engine"
    may_be_retried = False


class StepFailedError(QuireError):
    """The model's computation fails for this request, also when it runs alone; it is ended."""

    code = "step_failed"
    may_be_retried = False


class SchedulerStalledError(QuireError):
    """The scheduler has work, nothing is in flight, and no step can make progress."""

    code = "scheduler_stalled"


def check_characters(text: str, param: str | None, name: str | None = None) -> None:
    """Refuse a text that has half of a surrogate pair: it can't be encoded, hence never matched.

    name: what to call the text, if not `param`. Raises InvalidRequestError.
    """
    if text.isascii() or (found := _SURROGATE.search(text)) is None:
        return
    raise InvalidRequestError(
        f"{name or param or 'the text'} has U+{ord(found[0]):04X} at position {found.start()}: half"
        " of a surrogate pair, which is no character; send well-formed Unicode",
        param,
    )
