"""Answers calls of OpenAI's and vLLM's paths that quire lacks with a "not supported" error.

Without these routes, the calls would get the error for an unknown path. The OpenAPI document does
not list the routes. `app` includes them last.
"""

from collections.abc import Collection
from typing import NoReturn

from starlette.requests import Request as HTTPRequest

from quire.errors import QuireError

FAMILIES = (
    "agents",
    "assistants",
    "audio",
    "chatkit",
    "classify",
    "containers",
    "content_provenance_checks",
    "conversations",
    "decisions",
    "evals",
    "fine_tuning",
    "images",
    "live",
    "moderations",
    "organization",
    "projects",
    "realtime",
    "safety",
    "skills",
    "threads",
    "uploads",
    "vaults",
    "vector_stores",
    "videos",
    "webhook_endpoints",
    "webhook_event_types",
)
"""First segments, below /v1/, of paths that OpenAI's clients call or that vLLM adds."""

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


class NotSupportedError(QuireError):
    """A path that clients of other servers know, and that quire does not serve."""

    http_status = 404
    code = "not_supported"


async def refuse(http: HTTPRequest) -> NoReturn:
    """Answer that the path is not supported. Raises NotSupportedError."""
    *others, last = http.app.state.suggested_paths
    raise NotSupportedError(
        f"{http.url.path} is not supported by quire; it serves {', '.join(others)} and {last}"
    )


def refused_paths(served: Collection[str]) -> list[str]:
    """The path patterns of each family, such as /v1/files, that has no path in `served`."""
    found = []
    for family in FAMILIES:
        path = f"/v1/{family}"
        if not any(known == path or known.startswith(f"{path}/") for known in served):
            found += [path, f"{path}/{{rest:path}}"]
    return found
