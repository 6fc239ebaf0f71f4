"""Route and router classes of Ollama's API. Only browsers must send a Content-Type."""

from collections.abc import Iterable
from typing import Any

from starlette.requests import Request as HTTPRequest

from quire.server.routes.endpoint import Endpoints, JSONRoute


def ollama_error(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    """An error in Ollama's form, which has only a message."""
    return {"error": message}


class OllamaRoute(JSONRoute):
    """A route that reads bodies as JSON, like Ollama, even if their Content-Type is not JSON.

    `curl -d` and some clients send another Content-Type or none. Calls from web pages, which have
    an Origin, must declare JSON. Otherwise any page could call a server without keys, since
    browsers send types such as text/plain without asking for CORS permission.
    """

    def has_json(self, http: HTTPRequest) -> bool:
        return "origin" not in http.headers or super().has_json(http)


class OllamaEndpoints(Endpoints):
    """The routes of one file, with errors in Ollama's form."""

    route_class = OllamaRoute

    def __init__(
        self, generating_paths: Iterable[str] = (), operator_paths: Iterable[str] = ()
    ) -> None:
        super().__init__(
            error_form=ollama_error,
            generating_paths=generating_paths,
            operator_paths=operator_paths,
        )
