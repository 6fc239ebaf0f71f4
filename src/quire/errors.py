"""The exception tree: all errors that users can get, with their HTTP status.

QuireError                      500
├── InvalidRequestError         400  a request that can't be served as asked (also a ValueError)
│   ├── PromptTooLongError      400  the prompt leaves no room for a token within max_model_len
│   ├── NoTokenLeftError        422  its options exclude all possible next tokens
│   ├── GrammarTooComplexError  422  its grammar exceeded the limits in the middle of the answer
│   └── RequestNeverFitsError   422  valid, but needs more KV blocks than the whole pool has
├── AuthenticationError         401  no API key, or none that the server knows
├── OperatorOnlyError           403  a tenant asked for numbers of the whole server
├── RequestTimeoutError         408  the request's body does not arrive in time
├── DeadlineExceededError       408  the request's own deadline passed before its answer ended
├── BodyTooLongError            413  the request's body is longer than the server accepts
├── ConfigurationError          500  an engine option that can't be obeyed (also a ValueError)
│   ├── UnsupportedModelError   500  an architecture or config field that is not understood
│   ├── CheckpointError         500  a model folder that can't be read: missing, corrupt, pickled
│   ├── InsufficientMemoryError 500  not enough memory for the given options
│   └── ReplicaDiffersError     500  an engine whose results would differ from its fleet's
├── AdapterError                400  an adapter that can't be read, or that does not fit the model
├── OverloadedError             429  a bounded queue is full; `retry_after_s` says when to retry
│   ├── TenantBusyError         429  the tenant has reached its limit of open work
│   └── TokenRateError          429  the tenant has used up its tokens per minute
├── EngineDeadError             503  the engine process is gone or shutting down
├── ServerDrainingError         503  the server is shutting down and accepts no more requests
├── UploadsFullError            503  the bodies of all calls together have reached their limit
├── ExhaustedError              503  the system has no memory or file descriptor left
├── NoReplicaError              503  no replica of the fleet accepts requests now
├── RequestKillsEngineError     500  the engine died repeatedly while it computed this request
├── StepFailedError             500  a forward pass failed, which ends the requests in it
└── SchedulerStalledError       500  no step can make progress, which is a bug of quire
"""

import difflib
import re
import reprlib
from collections.abc import Iterable, Mapping

_SURROGATE = re.compile("[\ud800-\udfff]")


_MAX_NAME_CHARACTERS = 64
"""Characters of a name that are compared. Longer names are cut: comparing them would be slow."""

_LEAST_LIKENESS = 0.8
_LEAST_LIKENESS_OF_EQUAL_LENGTH = 0.75  # one of four letters differs, or two are swapped


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The text "; did you mean X?" for the known name X that `name` misspells or shortens.

    Returns "" if no name is close enough, because a wrong suggestion misleads.
    """
    ranked = sorted(((_likeness(name, each), each) for each in known), reverse=True)
    return f"; did you mean {ranked[0][1]}?" if ranked and ranked[0][0] > 0 else ""


def unknown_name(owner: object, name: str, advice: Mapping[str, str]) -> AttributeError:
    """The error for a missing attribute of the object `owner`.

    `advice` maps names to what to use instead. For other names the error suggests the nearest
    attribute of `owner`.
    """
    why = f": {advice[name]}" if name in advice else ""
    if not why:
        known = [each for each in dir(type(owner)) if not each.startswith("_")]
        why = did_you_mean(name, known)
    return AttributeError(f"{type(owner).__name__} has no {name}{why}", name=name, obj=owner)


def _likeness(name: str, known: str) -> float:
    """The similarity of two names, from 0 (unrelated) to 1 (equal except for outer dashes)."""
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
    """A short repr of a value from a file or request, for a message.

    It is one line without control characters. Of a long value, only the part that is shown is read.
    """
    return " ".join(_SHORT.repr(value).split("\n"))  # the repr of an array has several lines


class QuireError(Exception):
    """Base of all errors that quire raises on purpose."""

    http_status = 500
    code = "internal_error"
    #: Seconds after which the same request may succeed; None if unknown.
    retry_after_s: float | None = None
    #: If False, the response asks clients not to retry by themselves.
    may_be_retried = True
    #: Whether the connection is closed because the rest of its input can't be read as requests.
    ends_connection = False


class InvalidRequestError(QuireError, ValueError):
    """A request asks for something impossible. `param` is the request's field at fault, or None."""

    http_status = 400
    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(InvalidRequestError):
    """The prompt leaves no room for a generated token within max_model_len."""

    code = "context_length_exceeded"


class RequestNeverFitsError(InvalidRequestError):
    """The request needs more KV blocks than the whole pool has, so waiting does not help."""

    http_status = 422
    code = "request_never_fits"


class NoTokenLeftError(InvalidRequestError):
    """The request's options together exclude all possible next tokens.

    The sampler detects this during a step; the message is TEXT.
    """

    http_status = 422
    code = "no_token_left"
    TEXT = (
        "no token is left to generate: allowed_token_ids, bad_words, min_tokens and the grammar "
        "together exclude the whole vocabulary; relax one of them"
    )


class GrammarTooComplexError(InvalidRequestError):
    """An answer's grammar exceeds its limits, which ends the answer.

    The error is detected during a step. The message begins with TEXT.
    """

    http_status = 422
    code = "grammar_too_complex"
    TEXT = "the grammar became too complex to follow"


class AuthenticationError(QuireError):
    """The request has no API key, or an unknown one."""

    http_status = 401
    code = "invalid_api_key"


class OperatorOnlyError(QuireError):
    """A caller that is not the operator asks for figures about the whole server."""

    http_status = 403
    code = "operator_only"


class RequestTimeoutError(QuireError):
    """The body of the request does not arrive, or arrives too slowly."""

    http_status = 408
    code = "request_timeout"
    ends_connection = True  # otherwise the rest of the body could go on for ever


class DeadlineExceededError(QuireError):
    """The request's own deadline passed before its answer was complete."""

    http_status = 408
    code = "deadline_exceeded"
    may_be_retried = False


class BodyTooLongError(QuireError):
    """The body of the request is longer than the server accepts."""

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
    #: The beginning of all messages of this error.
    TEXT = "adapter "


class OverloadedError(QuireError):
    """A bounded queue is full. Retry after `retry_after_s` seconds."""

    http_status = 429
    code = "overloaded"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s: float = retry_after_s


class TenantBusyError(OverloadedError):
    """The tenant has reached its limit of open generations, or of bytes in request bodies."""

    code = "tenant_busy"


class TokenRateError(OverloadedError):
    """The tenant has used up its tokens per minute."""

    code = "rate_limit_exceeded"


class EngineDeadError(QuireError):
    """The engine process has ended, or is ending, and accepts no requests."""

    http_status = 503
    code = "engine_dead"
    retry_after_s = 5.0
    #: If the end of a rank's process ended the engine: its exit code, or minus the signal's number.
    #: None if the engine ended for another reason.
    rank_status: int | None = None


class ServerDrainingError(QuireError):
    """The server is shutting down: it finishes open requests and accepts no more."""

    http_status = 503
    code = "server_draining"

    def __init__(self, message: str, retry_after_s: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UploadsFullError(QuireError):
    """The bodies of all open calls together have reached their memory limit."""

    http_status = 503
    code = "uploads_full"
    retry_after_s = 1.0


class ExhaustedError(QuireError):
    """The operating system has no memory or file descriptor left for the request."""

    http_status = 503
    code = "exhausted"
    retry_after_s = 1.0


class ReplicaDiffersError(ConfigurationError):
    """An engine's results would differ from those of the other engines of its fleet."""

    code = "replica_differs"


class NoReplicaError(QuireError):
    """No replica of the fleet accepts requests, as all are dead, starting, draining or paused."""

    http_status = 503
    code = "no_replica"
    retry_after_s = 5.0


class RequestKillsEngineError(QuireError):
    """The engine died repeatedly while it computed this request. Other requests continue."""

    code = "request_kills_engine"
    may_be_retried = False


class StepFailedError(QuireError):
    """The forward pass fails for this request, even if it runs alone, so the request is ended."""

    code = "step_failed"
    may_be_retried = False


class SchedulerStalledError(QuireError):
    """The scheduler has work and no step in flight, but no step can make progress."""

    code = "scheduler_stalled"


def check_characters(text: str, param: str | None, name: str | None = None) -> None:
    """Refuse text with half of a surrogate pair, which UTF-8 can't encode, so no output matches it.

    Raises InvalidRequestError; its message calls the text `name`, or `param` if `name` is None.
    """
    if text.isascii() or (found := _SURROGATE.search(text)) is None:
        return
    raise InvalidRequestError(
        f"{name or param or 'the text'} has U+{ord(found[0]):04X} at position {found.start()}: half"
        " of a surrogate pair, which is no character; send well-formed Unicode",
        param,
    )
