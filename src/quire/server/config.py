"""Every option of the server, by the name of its flag. Called by `launch` and the command line.

Flat, since people write it down (flags, a YAML file); `launch` makes the components' own small
configurations of it.
"""

import math
from dataclasses import dataclass, field

from quire.errors import ConfigurationError

MAX_QUEUED_REQUESTS = 1024
KEEP_ALIVE_S = 10.0
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")

_COUNTS = (
    "drain_timeout_s",
    "max_queued_requests",
    "max_tenant_requests",
    "max_tenant_tokens_per_minute",
    "max_body_bytes",
    "max_prompts",
    "max_n",
    "max_choices",
    "max_stop_strings",
    "max_list_length",
)
_SECONDS = ("default_deadline_s", "heartbeat_timeout_s", "keep_alive_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where to serve, as what, for whom, and within which bounds.

    port: 0 takes any free one.
    served_model_name: None: the model as it was named, or "embedded".
    drain_timeout_s: how long open answers may go on after the first signal.
    max_queued_requests: open at once; beyond that the answer is 429.

    api_keys: "name:key" or "key", each a tenant; api_key_file: one such line each, read again when
        it changes. Without any, every client is served, as one tenant.
    max_tenant_requests: generations that one tenant may have open at once (None: no bound of its
        own). max_tenant_tokens_per_minute: prompt and generated tokens (None: no bound).
    allowed_origins: web pages from these origins may call the server ("*": any); none by default.

    max_body_bytes, max_prompts, max_n, max_choices, max_stop_strings, max_list_length: bounds of
        one call; max_choices is of prompts times n, max_list_length of stop_token_ids, bad_words,
        logit_bias and the like.
    default_deadline_s: a call that says none itself is ended after so long (None: never).

    heartbeat_timeout_s: an engine whose step takes longer counts as hung, and is started again.
    max_engine_restarts: after so many within five minutes the server gives up.
    keep_alive_s: a stream without news gets a comment so often, so that proxies keep it open.

    log_level: one of LOG_LEVELS. log_format: "text" or "json", one object a line. otlp_endpoint:
        where OpenTelemetry spans go (None: nowhere).
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    drain_timeout_s: int = 30
    max_queued_requests: int = MAX_QUEUED_REQUESTS
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # no traceback shows a key
    api_key_file: str | None = None
    max_tenant_requests: int | None = None
    max_tenant_tokens_per_minute: int | None = None
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 8 << 20
    max_prompts: int = 256
    max_n: int = 128
    max_choices: int = 1024
    max_stop_strings: int = 64
    max_list_length: int = 4096
    default_deadline_s: float | None = None
    heartbeat_timeout_s: float = 60.0
    max_engine_restarts: int = 5
    keep_alive_s: float = KEEP_ALIVE_S
    log_level: str = "info"
    log_format: str = "text"
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ConfigurationError(f"port is {self.port}, but must be from 0 (any) to 65535")
        for name in _COUNTS:
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ConfigurationError(f"{name} is {count}, but must be at least 1")
        if self.max_engine_restarts < 0:
            raise ConfigurationError(
                f"max_engine_restarts is {self.max_engine_restarts}, but must be 0 (never) or more"
            )
        for name in _SECONDS:
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < math.inf:
                raise ConfigurationError(f"{name} is {seconds:g}, but must be above 0")
        for name, known in (("log_format", LOG_FORMATS), ("log_level", LOG_LEVELS)):
            value = getattr(self, name)
            if value not in known:
                raise ConfigurationError(
                    f"{name} is {value!r}, but must be one of {', '.join(known)}"
                )
