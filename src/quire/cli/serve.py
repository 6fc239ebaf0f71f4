"""The flags of `quire serve`: every field of ServerConfig has one, in groups, beside the engine's.

Only light imports: `quire serve --help` comes through this file. Called by `parser` and `main`.
"""

import argparse
import json
from dataclasses import fields
from typing import Any

from quire.cli.options import Once, add_engine, add_model_by_place, engine_options
from quire.config import EngineOptions, parse_bytes
from quire.errors import ConfigurationError
from quire.server.config import LOG_FORMATS, LOG_LEVELS, ServerConfig

_DEFAULTS = ServerConfig()


def add_serve(parser: argparse.ArgumentParser) -> None:
    """All flags of the command."""
    add_model_by_place(parser)
    _add_server(parser)
    _add_access(parser)
    _add_limits(parser)
    _add_recovery(parser)
    _add_logging(parser)
    add_engine(parser)


def server_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was given for the server, by ServerConfig's names. Raises ConfigurationError."""
    given = {field.name: getattr(args, field.name) for field in fields(ServerConfig)}
    if given["allowed_origins"] is not None:
        given["allowed_origins"] = [one for text in given["allowed_origins"] for one in _list(text)]
    if given["max_body_bytes"] is not None:
        given["max_body_bytes"] = parse_bytes("max_body_bytes", given["max_body_bytes"])
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if value is not None
    }


def check_values(args: argparse.Namespace) -> None:
    """Raises ConfigurationError for values that the server or the engine would refuse."""
    ServerConfig(**server_options(args))
    EngineOptions.from_mapping(engine_options(args))


def _list(text: str) -> list[str]:
    """A value that may be a list in JSON, as users of vLLM write it."""
    if not text.startswith("["):
        return [text]
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ConfigurationError(
            f"allowed_origins is {text!r:.80}, but must be an origin, or a list of them in JSON"
        )
    return found


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--config", metavar="FILE", help="YAML file with flags; the command line wins over it"
    )
    group.add_argument(
        "--model", action=Once, metavar="MODEL", help="the same as the positional MODEL"
    )
    group.add_argument("--host", help=f"address to listen on ({_DEFAULTS.host})")
    group.add_argument(
        "--port", type=int, help=f"port to listen on; 0: any free one ({_DEFAULTS.port})"
    )
    group.add_argument(
        "--served-model-name", metavar="NAME", help="the model's name for clients (MODEL)"
    )
    group.add_argument(
        "--drain-timeout-s",
        type=int,
        metavar="S",
        help=f"time for open answers to finish after SIGTERM ({_DEFAULTS.drain_timeout_s})",
    )
    group.add_argument(
        "--keep-alive-s",
        type=float,
        metavar="S",
        help=f"interval of comments in a stream that pauses ({_DEFAULTS.keep_alive_s:g})",
    )
    group.add_argument(
        "--seed",
        type=int,
        help="makes the seeds of unseeded requests the same after each start (random seeds)",
    )


def _add_access(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("access", "Without any key, everybody is served.")
    group.add_argument(
        "--api-key",
        dest="api_keys",
        action="append",
        metavar="NAME:KEY",
        help="a tenant's key; may be repeated. Visible in the list of processes: better use"
        " --api-key-file, or QUIRE_API_KEYS in the environment",
    )
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="file with one NAME:KEY per line; read again when it changes",
    )
    group.add_argument(
        "--allowed-origins",
        action="append",
        metavar="ORIGIN",
        help="origin whose web pages may call the server; may be repeated; '*': any (none)",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "limits", "A call above a limit is refused with an error that names it."
    )

    def add(flag: str, metavar: str, text: str, kind: Any = int) -> None:
        default = getattr(_DEFAULTS, flag.removeprefix("--").replace("-", "_"))
        shown = "no bound" if default is None else f"{default:g}"
        group.add_argument(flag, type=kind, metavar=metavar, help=f"{text} ({shown})")

    add("--max-queued-requests", "N", "open generations of all tenants; above: 429")
    add("--max-tenant-requests", "N", "open generations of one tenant")
    add(
        "--max-tenant-tokens-per-minute",
        "N",
        "prompt and generated tokens of one tenant, on average",
    )
    group.add_argument(
        "--max-body-bytes",
        metavar="SIZE",
        help=f"size of a call's body, such as 4MiB ({_DEFAULTS.max_body_bytes >> 20}MiB)",
    )
    add("--max-prompts", "N", "prompts of one call")
    add("--max-n", "N", "choices (n) per prompt")
    add("--max-choices", "N", "prompts times n of one call")
    add("--max-stop-strings", "N", "stop strings of one call")
    add("--max-list-length", "N", "entries of stop_token_ids, bad_words, logit_bias and the like")
    add("--default-deadline-s", "S", "time limit of calls without a deadline_s", float)


def _add_recovery(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("recovery")
    group.add_argument(
        "--heartbeat-timeout-s",
        type=float,
        metavar="S",
        help=f"restart the engine if a step takes longer ({_DEFAULTS.heartbeat_timeout_s:g})",
    )
    group.add_argument(
        "--max-engine-restarts",
        type=int,
        metavar="N",
        help="end the server after more restarts than this in five minutes"
        f" ({_DEFAULTS.max_engine_restarts})",
    )


def _add_logging(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("logging")
    group.add_argument(
        "--log-level", metavar="LEVEL", help=f"{', '.join(LOG_LEVELS)} ({_DEFAULTS.log_level})"
    )
    group.add_argument(
        "--log-format", metavar="NAME", help=f"{' or '.join(LOG_FORMATS)} ({_DEFAULTS.log_format})"
    )
    group.add_argument(
        "--otlp-endpoint", metavar="URL", help="OTLP/HTTP collector for OpenTelemetry spans (none)"
    )
    group.add_argument(
        "--disable-log-stats",
        action="store_true",
        default=None,
        help="don't log throughput and memory use every ten seconds",
    )
