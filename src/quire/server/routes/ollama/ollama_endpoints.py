"""How Ollama's endpoints are declared: bodies are JSON whatever their Content-Type."""

from collections.abc import Iterable
from typing import Any

from starlette.requests import Request as HTTPRequest

from quire.server.routes.endpoint import Endpoints, JSONRoute


def ollama_error(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    """The form of Ollama's API, which has only a message."""
    return {"error": message}


class OllamaRoute(JSONRoute):
    """A route that reads every body as JSON, as Ollama does.

    `curl -d` and some clients send another Content-Type or none. A browser sends an Origin with
    every POST of a page, and such calls must declare JSON: any web page can send other types to a
    server without keys, without being allowed to.
    """

    def has_json(self, http: HTTPRequest) -> bool:
        return "origin" not in http.headers or super().has_json(http)


class OllamaEndpoints(Endpoints):
    """The routes of one file, with errors in Ollama's form."""

    route_class = OllamaRoute

    def __init__(self, generating_paths: Iterable[str] = ()) -> None:
        super().__init__(error_form=ollama_error, generating_paths=generating_paths)
