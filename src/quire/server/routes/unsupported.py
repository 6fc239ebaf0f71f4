"""What OpenAI's API has, and the APIs that look like it, and quire has not: refused by name.

Without these routes such a call would be told that the path is wrong, though it is right. The
routes are no part of the OpenAPI document. Included last by `app`.
"""

from typing import NoReturn

from fastapi import APIRouter
from fastapi import Request as HTTPRequest

from quire.errors import QuireError

router = APIRouter(include_in_schema=False)

FAMILIES = (
    "agents",
    "assistants",
    "audio",
    "batches",
    "chatkit",
    "classify",
    "containers",
    "content_provenance_checks",
    "conversations",
    "decisions",
    "embeddings",
    "evals",
    "files",
    "fine_tuning",
    "images",
    "live",
    "messages",
    "moderations",
    "organization",
    "projects",
    "realtime",
    "rerank",
    "responses",
    "safety",
    "score",
    "skills",
    "threads",
    "uploads",
    "vaults",
    "vector_stores",
    "videos",
    "webhook_endpoints",
    "webhook_event_types",
)
"""First parts of paths behind /v1/: of OpenAI's own clients, Anthropic's messages, and what vLLM
has beside them."""

_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


class NotSupportedError(QuireError):
    """A path that others' clients know, and that quire does not serve."""

    http_status = 404
    code = "not_supported"


async def refuse(http: HTTPRequest) -> NoReturn:
    """Say that there is no such thing here. Raises NotSupportedError."""
    raise NotSupportedError(
        f"{http.url.path} is not supported by quire; it serves /v1/completions,"
        " /v1/chat/completions, /v1/models, /tokenize and /detokenize"
    )


for _family in FAMILIES:
    for _path in (f"/v1/{_family}", f"/v1/{_family}/{{rest:path}}"):
        router.add_api_route(_path, refuse, methods=list(_METHODS), response_model=None)
# Answers that were stored: none are.
router.add_api_route(
    "/v1/chat/completions/{rest:path}", refuse, methods=list(_METHODS), response_model=None
)
