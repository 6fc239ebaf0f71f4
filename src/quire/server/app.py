"""The HTTP application: its endpoints and its middlewares.

A call first passes `telemetry.monitor`, which assigns an id and logs a line. Then follow the check
of its head, CORS if origins are allowed, the checks of its key and its body, and the handler of
unexpected exceptions. `http.guard` has the three checks. All middlewares are plain ASGI, so streams
and disconnects pass through them untouched.

`launch`, not the application, starts and ends the engine: the engine must also end when the server
is stopped by force, after which no application code runs. Imports no torch.
"""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware

from quire.errors import ConfigurationError
from quire.server.endpoint_registry import ENDPOINTS
from quire.server.http.errors import error_handlers
from quire.server.http.guard import AccessConfig, AccessGuard, BodyLimit, RequestHead
from quire.server.routes.endpoint import Endpoints
from quire.server.routes.unsupported import refused_paths
from quire.server.served_models import ServedModels
from quire.server.service import SharedState
from quire.server.telemetry.monitor import BugReporter, RequestIdMiddleware

SECURITY_HEADERS = [("x-content-type-options", "nosniff")]
"""Headers of every answer. uvicorn, not the application, adds them, at no cost per call."""

OPEN = AccessConfig()

FORM_BYTES = 64 << 10
"""Bytes that an upload may have beside its file."""


def all_endpoints() -> list[Endpoints]:
    """The endpoints that are registered. Raises ConfigurationError if one can't be imported, or if
    two have one route."""
    names: dict[tuple[str, str], str] = {}
    for name, each in ENDPOINTS.items():
        for route in each.own_routes:
            for method in route.methods or ():
                if (first := names.setdefault((method, route.path), name)) != name:
                    raise ConfigurationError(
                        f"the endpoints {first} and {name} both answer {method} {route.path}; give"
                        " one of them another path"
                    )
    return [each for _, each in ENDPOINTS.items()]


def create_app(
    models: ServedModels, access: AccessConfig = OPEN, endpoints: Sequence[Endpoints] | None = None
) -> Starlette:
    """The application that serves `models` at `endpoints`; None means `all_endpoints`."""
    endpoints = all_endpoints() if endpoints is None else endpoints
    refused = Endpoints()  # last, since its routes also match paths below other routes
    for path in refused_paths([path for each in endpoints for path in each.paths]):
        refused.refuse(path)
    routes = [route for each in (*endpoints, refused) for route in each.routes]
    suggested = [path for each in endpoints for path in each.batch_paths]
    app = Starlette(routes=routes, exception_handlers=error_handlers(suggested))
    # Behind a proxy, a redirect would name the scheme and host of this process, not the proxy's.
    app.router.redirect_slashes = False
    app.state.models = models
    app.state.suggested_paths = _suggested(endpoints)
    app.state.batch_paths = suggested
    app.state.error_forms = [form for each in endpoints for form in each.error_forms]
    _add_middlewares(app, models.shared, access, endpoints)
    return app


def _upload_bytes(shared: SharedState, endpoints: Sequence[Endpoints]) -> dict[str, int]:
    """The bound of a body by path, for the paths that write files; empty if the server has no
    folder for them."""
    if shared.batches is None:
        return {}
    bound = shared.batches.files.max_file_bytes + FORM_BYTES
    return {path: bound for each in endpoints for path in each.upload_paths}


def _suggested(endpoints: Sequence[Endpoints]) -> list[str]:
    """The paths that a 404 suggests, in alphabetical order, with OpenAI's paths first."""
    found = [path for each in endpoints if each.is_suggested for path in each.paths]
    return sorted((path for path in found if "{" not in path), key=lambda p: "/v1/" not in p)


def _add_middlewares(
    app: Starlette, shared: SharedState, access: AccessConfig, endpoints: Sequence[Endpoints]
) -> None:
    """Add the middlewares, the innermost first."""
    operator_paths = [path for each in endpoints for path in each.operator_paths]
    named = (path for each in endpoints for path in each.paths if ":path}" in path)
    app.add_middleware(BugReporter)
    app.add_middleware(
        BodyLimit,
        max_bytes=access.max_body_bytes,
        timeout_s=access.body_timeout_s,
        budget=access.bodies,
        upload_bytes=_upload_bytes(shared, endpoints),
    )
    app.add_middleware(
        AccessGuard,
        keys=access.keys,
        open_paths=frozenset(path for each in endpoints for path in each.open_paths),
        operator_paths=operator_paths,
    )
    if access.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=access.allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),  # client libraries add various headers to each call
            expose_headers=("X-Request-ID", "Request-ID", "X-Ignored-Fields", "Retry-After"),
        )
    app.add_middleware(
        RequestHead,
        name_prefixes=[path.partition("{")[0] for path in named],
        operator_paths=operator_paths,
        hosts=access.hosts,
    )
    app.add_middleware(
        RequestIdMiddleware,
        monitor=shared.monitor,
        probes=frozenset(path for each in endpoints for path in each.probes),
        generating=frozenset(path for each in endpoints for path in each.generating_paths),
    )
