"""The HTTP application: which path is served where. Imports no torch.

The engine's life is in the hands of `launch`, not of the application: it must also end when the
server is stopped by force, and then no application code runs any more.
"""

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server import chat, completions, health, memory, models
from quire.server.errors import install_error_handlers
from quire.server.service import Service
from quire.version import __version__

MAX_BODY_BYTES = 64 << 20


class BodyLimit:
    """Refuses a request body as soon as more than MAX_BODY_BYTES of it have come."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes = 0

        async def receive_some() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
            return message

        await self._app(scope, receive_some, send)


def create_app(service: Service) -> FastAPI:
    """The application that serves `service`."""
    app = FastAPI(title="quire", version=__version__, redoc_url=None)
    app.state.service = service
    app.add_middleware(BodyLimit)
    install_error_handlers(app)
    for family in (completions, chat, models, health, memory):
        app.include_router(family.router)
    return app
