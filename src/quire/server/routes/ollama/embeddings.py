"""POST /api/embed and /api/embeddings of Ollama's API: texts in, vectors out."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
from pydantic import field_validator
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from quire.engine_client.pooling_inputs import (
    WHOLE,
    WHOLE_CONTEXT,
    PoolingInput,
    Truncation,
    numbers_of,
)
from quire.errors import InvalidRequestError
from quire.server.generation.answer import LATER, filled
from quire.server.generation.call_body import Texts, left_out
from quire.server.generation.http_generation import fields_named
from quire.server.generation.pooling_call import Pooled, PoolingBody, PoolingCall
from quire.server.http.body import UnknownFields
from quire.server.http.long_work import call_for_text
from quire.server.http.streaming import PieceByPiece, json_response
from quire.server.limits import CallLimits, too_many_entries
from quire.server.routes.ollama.ollama_body import untagged, without_tag
from quire.server.routes.ollama.ollama_endpoints import OllamaEndpoints
from quire.server.routes.ollama.served_models import ERROR_RESPONSES
from quire.server.routes.openapi import answers

router = OllamaEndpoints()

_encode_json = msgspec.json.Encoder().encode


class OllamaPoolingBody(PoolingBody):
    """The fields that the bodies of /api/embed and /api/embeddings share."""

    unknown_fields: ClassVar[UnknownFields] = "ignore"
    hints: ClassVar[frozenset[str]] = PoolingBody.hints | {"keep_alive", "options"}
    notes: ClassVar[Mapping[str, str]] = {
        "model": "the name in `/api/tags`, with or without `:latest`",
    }

    @classmethod
    def model_named(cls, fields: Mapping[str, Any]) -> Any:
        """See `Body`."""
        return untagged(super().model_named(fields))

    @field_validator("model")
    @classmethod
    def _without_tag(cls, name: str | None) -> str | None:
        return without_tag(name)


class OllamaEmbedRequest(OllamaPoolingBody):
    """The body of POST /api/embed."""

    notes: ClassVar[Mapping[str, str]] = {
        "input": "a text, or a list of texts",
        "truncate": "false refuses a text that is too long; otherwise its first tokens are kept",
        "dimensions": "number of first elements to return, if the model was trained for it",
    }

    input: str | Texts
    truncate: bool = True
    dimensions: int | None = left_out(minimum=1)

    @property
    def inputs(self) -> list[str]:
        """The texts as a list."""
        return [self.input] if isinstance(self.input, str) else self.input

    @property
    def truncation(self) -> Truncation:
        if self.truncate_prompt_tokens is None and self.truncate:
            return Truncation(WHOLE_CONTEXT)
        return super().truncation

    @classmethod
    def check_fields(
        cls, fields: Mapping[str, Any], limits: CallLimits, max_model_len: int
    ) -> None:
        super().check_fields(fields, limits, max_model_len)
        given = fields.get("input")
        if isinstance(given, list) and len(given) > limits.max_inputs:
            raise too_many_entries("input", given, limits.max_inputs)


class OllamaEmbeddingRequest(OllamaPoolingBody):
    """The body of POST /api/embeddings."""

    notes: ClassVar[Mapping[str, str]] = {"prompt": "a text; its end is cut if it is too long"}

    prompt: str

    @property
    def truncation(self) -> Truncation:
        given = super().truncation
        return Truncation(WHOLE_CONTEXT) if given == WHOLE else given


class OllamaEmbeddings(msgspec.Struct):
    """The vectors of /api/embed, each of length 1. Durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    prompt_eval_count: int
    load_duration: int = 0


class OllamaEmbedding(msgspec.Struct):
    """The vector of /api/embeddings, in the length that the model gives it."""

    embedding: list[float]


@router.post("/api/embed", responses=answers(OllamaEmbeddings, errors=ERROR_RESPONSES))
async def ollama_embed(body: OllamaEmbedRequest, http: HTTPRequest) -> Response:
    """The vector of each text, in Ollama's form."""
    began_s = time.monotonic()

    async def write(pooled: Pooled) -> Response:
        elapsed_ns = int((time.monotonic() - began_s) * 1e9)
        name = call.service.answered_name(body.model)
        whole = OllamaEmbeddings(name, [LATER], elapsed_ns, pooled.num_tokens)
        return PieceByPiece(call.service.work.join(filled(whole, _vectors(pooled))))

    call = PoolingCall(http, body, "ollama", "embeddings")
    with fields_named({"prompt": "input"}):
        inputs = await _inputs(call, body, body.inputs, "input", body.dimensions, normalize=True)
        return await call.answer(inputs, write)


@router.post("/api/embeddings", responses=answers(OllamaEmbedding, errors=ERROR_RESPONSES))
async def ollama_embeddings(body: OllamaEmbeddingRequest, http: HTTPRequest) -> Response:
    """The vector of one text, in the form of Ollama's older path."""

    async def write(pooled: Pooled) -> Response:
        return json_response(OllamaEmbedding(numbers_of(pooled.results[0])))

    call = PoolingCall(http, body, "ollama", "embeddings")
    inputs = await _inputs(call, body, [body.prompt], "prompt", None, normalize=False)
    return await call.answer(inputs, write)


def _vectors(pooled: Pooled) -> Iterator[bytes]:
    """The JSON of the vectors, one by one, since they may be many and long."""
    for index, result in enumerate(pooled.results):
        yield (b"," if index else b"") + _encode_json(numbers_of(result))


async def _inputs(
    call: PoolingCall,
    body: OllamaPoolingBody,
    texts: Sequence[str],
    param: str,
    dimensions: int | None,
    *,
    normalize: bool,
) -> list[PoolingInput]:
    """The checked texts as inputs of the engine."""
    call.check_texts(texts, param)
    for index, text in enumerate(texts):
        if not text:
            raise InvalidRequestError(f"text {index} is empty; give at least one token", param)

    def make() -> list[PoolingInput]:
        return [
            call.inputs.embed(
                text, dimensions=dimensions, normalize=normalize, truncation=body.truncation
            )
            for text in texts
        ]

    return await call_for_text(sum(map(len, texts)), make)
