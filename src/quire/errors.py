"""The exception tree. Every error a user can meet is one of these, with its HTTP status.

QuireError                      500
├── InvalidRequestError         400  a request that can't be served as asked (also a ValueError)
│   ├── PromptTooLongError      400  the prompt leaves no room for a token within max_model_len
│   └── RequestNeverFitsError   400  needs more KV blocks than the whole pool has
├── ConfigurationError          500  an engine option that can't be obeyed (also a ValueError)
│   ├── UnsupportedModelError   500  an architecture or config field that is not understood
│   ├── CheckpointError         500  a model folder that can't be read: missing, corrupt, pickled
│   └── InsufficientMemoryError 500  not enough memory for what the options ask
├── OverloadedError             429  a bounded queue is full; `retry_after_s` says when to retry
├── EngineDeadError             503  the engine process is gone or shutting down
├── StepFailedError             500  a forward pass failed; ends the requests that were in it
└── SchedulerStalledError       500  a step can make no progress: a bug, never a user's mistake
"""


class QuireError(Exception):
    """Base of all errors that quire raises on purpose."""

    http_status = 500
    code = "internal_error"


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

    code = "request_never_fits"


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


class OverloadedError(QuireError):
    """A bounded queue is full. Retry after `retry_after_s` seconds."""

    http_status = 429
    code = "overloaded"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDeadError(QuireError):
    """The engine process has ended, or is ending, and takes no requests."""

    http_status = 503
    code = "engine_dead"


class StepFailedError(QuireError):
    """The model's computation fails for this request, also when it runs alone; it is ended."""

    code = "step_failed"


class SchedulerStalledError(QuireError):
    """The scheduler has work, nothing is in flight, and no step can make progress."""

    code = "scheduler_stalled"
