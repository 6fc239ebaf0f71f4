"""POST /v1/echo-upper: continues a prompt, in capital letters."""

from collections.abc import Iterator, Mapping
from typing import ClassVar

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from quire.engine_client.results import Delta
from quire.server.generation.answer import Answer, Usage, generate
from quire.server.generation.body import NOT_SUPPORTED, GenerationBody
from quire.server.generation.call_body import Params
from quire.server.generation.http_generation import Prompts
from quire.server.http.streaming import event
from quire.server.routes.endpoint import Endpoints
from quire.server.routes.openapi import answers
from quire.server.service import Service

router = Endpoints()


class UpperBody(GenerationBody):
    """POST /v1/echo-upper."""

    not_supported: ClassVar[Mapping[str, tuple[object, ...]]] = {**NOT_SUPPORTED, "suffix": ("",)}
    notes: ClassVar[Mapping[str, str]] = {"prompt": "the text to continue"}
    prompt: str

    def to_params(self) -> Params:
        return self._make_params(16 if self.max_tokens is None else self.max_tokens, None)


class Upper(msgspec.Struct):
    """texts: of the choices. usage: of the whole call; of an event that has none, null."""

    id: str
    texts: list[str]
    usage: Usage | None


class UpperAnswer(Answer[UpperBody]):
    id_prefix = "upper"

    @classmethod
    async def prompts(cls, service: Service, body: UpperBody) -> Prompts:
        return Prompts([body.prompt])

    def _whole(self, choices: list[str]) -> Upper:
        return Upper(self._call_id, choices, self._usage())

    def _whole_choice(self, choice: int, delta: Delta) -> Iterator[bytes]:
        self._num_generated += len(delta.token_ids)
        yield msgspec.json.encode(delta.text.upper())

    def _events(self, choice: int, delta: Delta) -> Iterator[bytes]:
        self._num_generated += len(delta.token_ids)
        yield event(Upper(self._call_id, [delta.text.upper()], None))

    def _end_events(self) -> Iterator[bytes]:
        if self._body.include_usage:
            yield event(Upper(self._call_id, [], self._usage()))


@router.post("/v1/echo-upper", responses=answers(Upper, streams=True))
async def echo_upper(body: UpperBody, http: HTTPRequest) -> Response:
    """Continue the prompt in capital letters."""
    return await generate(http, body, UpperAnswer)
