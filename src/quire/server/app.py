"""The HTTP application: which path is served where, and what a call goes through on its way there.

From outside in: the request's id and its line in the log (`request_id`), what its head may say
(`request_head`), CORS if origins are allowed, the guard (`access`), the bounds of the body
(`body_limit`), answers to bugs (`errors`), the routes. All are plain ASGI, so that streams and
disconnects pass through them untouched.

The engine's life is in the hands of `launch`, not of the application: it must also end when the
server is stopped by force, and then no application code runs any more. Imports no torch.
"""

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from quire.server.http.access import AccessConfig, AccessGuard
from quire.server.http.body_limit import BodyLimit
from quire.server.http.errors import BugReporter, install_error_handlers
from quire.server.http.request_head import RequestHead
from quire.server.routes import unsupported
from quire.server.routes.admin import health, memory, metrics, version
from quire.server.routes.admin.docs_page import install_page
from quire.server.routes.openai import chat, completions, models
from quire.server.routes.vllm import tokenize
from quire.server.service import Service
from quire.server.telemetry.request_id import RequestIdMiddleware
from quire.version import __version__

SECURITY_HEADERS = [("x-content-type-options", "nosniff")]
"""For every answer; the HTTP server itself adds them, at no cost per call."""

OPEN = AccessConfig()


def create_app(service: Service, access: AccessConfig = OPEN) -> FastAPI:
    """The application that serves `service`."""
    # A redirect would name the scheme and host that this process sees, not those of a proxy.
    app = FastAPI(
        title="quire", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.service = service
    install_error_handlers(app)
    # Each one stands outside of those before it.
    app.add_middleware(BugReporter)
    app.add_middleware(BodyLimit, max_bytes=access.max_body_bytes, timeout_s=access.body_timeout_s)
    app.add_middleware(AccessGuard, keys=access.keys)
    if access.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=access.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # clients in browsers add headers of their own to each call
            expose_headers=("X-Request-ID", "Retry-After"),
        )
    app.add_middleware(RequestHead)
    app.add_middleware(RequestIdMiddleware, monitor=service.monitor)
    families = (completions, chat, tokenize, models, version, health, memory, metrics)
    install_page(app)
    for family in (*families, unsupported):  # the last takes what none of the others has
        app.include_router(family.router)
    return app
