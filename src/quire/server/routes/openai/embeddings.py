"""POST /v1/embeddings: texts or token ids in, vectors out."""

import base64
from collections.abc import Generator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from quire.core.request import prompt_too_long
from quire.engine_client.pooling_inputs import PoolingInput, numbers_of
from quire.errors import InvalidRequestError
from quire.server.generation.answer import LATER, filled
from quire.server.generation.call_body import Texts, TokenIds, left_out
from quire.server.generation.http_generation import fields_named
from quire.server.generation.pooling_call import (
    Pooled,
    PoolingBody,
    PoolingCall,
    PoolingUsage,
    usage_of,
)
from quire.server.http.json_body import MAX_VALUES
from quire.server.http.long_work import call_for_text
from quire.server.http.streaming import PieceByPiece
from quire.server.limits import CallLimits, too_many_entries
from quire.server.routes.endpoint import Endpoints
from quire.server.routes.openapi import answers

router = Endpoints()

_encode_json = msgspec.json.Encoder().encode


class EmbeddingRequest(PoolingBody):
    """The body of POST /v1/embeddings."""

    notes: ClassVar[Mapping[str, str]] = {
        "input": "a text, the token ids of one, or a list of either",
        "encoding_format": "`base64`: fp32 numbers, little-endian",
        "dimensions": "number of first elements to return, if the model was trained for it",
        "normalize": "to length 1; where left out as the model's folder says, else true",
    }

    max_values: ClassVar[int] = MAX_VALUES  # inputs may be long lists of token ids

    #: An input as text or as token ids, or a list of either. Each input gets a vector.
    input: str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)]
    #: Form of the vectors; "base64" encodes fp32 numbers, little-endian.
    encoding_format: Literal["float", "base64"] = "float"
    #: Number of leading elements of each vector to return; None means all.
    dimensions: int | None = left_out(minimum=1)
    # extensions to OpenAI's API
    #: Whether vectors are scaled to length 1; None means the setting in the model's folder, or true
    #: without a setting.
    normalize: bool | None = None

    @property
    def inputs(self) -> list[Any]:
        """The inputs as a list of texts or of lists of token ids."""
        given: Any = self.input
        is_one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        return [given] if is_one else given

    @classmethod
    def check_fields(
        cls, fields: Mapping[str, Any], limits: CallLimits, max_model_len: int
    ) -> None:
        super().check_fields(fields, limits, max_model_len)
        given = fields.get("input")
        if not isinstance(given, list) or not given:
            return
        if not isinstance(given[0], int):
            if len(given) > limits.max_inputs:
                raise too_many_entries("input", given, limits.max_inputs)
        elif len(given) > max_model_len and fields.get("truncate_prompt_tokens") is None:
            raise prompt_too_long(len(given), max_model_len, generates=False)


class Embedding(msgspec.Struct):
    """The vector of one input."""

    index: int
    #: The numbers, or their bytes in base64.
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class Embeddings(msgspec.Struct):
    """The answer."""

    id: str
    model: str
    data: list[Embedding]
    usage: PoolingUsage
    created: int
    object: Literal["list"] = "list"


@router.post("/v1/embeddings", responses=answers(Embeddings))
async def create_embeddings(body: EmbeddingRequest, http: HTTPRequest) -> Response:
    """The vector of each input."""
    call = PoolingCall(http, body, "embd", "embeddings")
    given = body.inputs
    call.check_texts(given, "input")
    size = sum(map(len, given))
    with fields_named({"prompt": "input"}):
        inputs = await call_for_text(size, _inputs, call, body)

        async def write(pooled: Pooled) -> Response:
            return PieceByPiece(call.service.work.join(_written(call, body, pooled)))

        return await call.answer(inputs, write)


def _inputs(call: PoolingCall, body: EmbeddingRequest) -> list[PoolingInput]:
    found = []
    for index, each in enumerate(body.inputs):
        if not each:
            raise InvalidRequestError(f"input {index} is empty; give at least one token", "input")
        found.append(
            call.inputs.embed(
                each,
                dimensions=body.dimensions,
                normalize=body.normalize,
                truncation=body.truncation,
            )
        )
    return found


def _written(
    call: PoolingCall, body: EmbeddingRequest, pooled: Pooled
) -> Generator[bytes, None, None]:
    """The answer's JSON, vector by vector, since vectors may be many and long."""
    whole = Embeddings(
        pooled.call_id, call.service.model_name, [LATER], usage_of(pooled), call.created_s
    )

    def vectors() -> Generator[bytes, None, None]:
        for index, result in enumerate(pooled.results):
            embedding: list[float] | str
            if body.encoding_format == "base64":
                embedding = base64.b64encode(result).decode()
            else:
                embedding = numbers_of(result)
            yield (b"," if index else b"") + _encode_json(Embedding(index, embedding))

    yield from filled(whole, vectors())
