"""POST /score and /rerank: scores how well texts match; forms of vLLM, Jina, Cohere.

Cross-encoders, which have a scoring head or answer with one of two tokens, read both texts of a
pair as one input. With any other model, the score compares the embeddings of both texts.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from quire.engine_client.pooling_inputs import PoolingInput, numbers_of, score_of, similarity
from quire.errors import InvalidRequestError
from quire.server.generation.call_body import Texts, left_out
from quire.server.generation.http_generation import fields_named
from quire.server.generation.pooling_call import (
    Pooled,
    PoolingBody,
    PoolingCall,
    PoolingUsage,
    usage_of,
)
from quire.server.http.body import Body
from quire.server.http.long_work import call_for_text
from quire.server.http.streaming import json_response
from quire.server.routes.endpoint import Endpoints
from quire.server.routes.openapi import answers

router = Endpoints()

Pair = tuple[str, str]
Write = Callable[[list[float], Pooled], Response]


class ScoringBody(PoolingBody):
    """The fields that the bodies of /score and /rerank share."""

    #: Name of the field with the texts that are scored, for errors.
    texts_field: ClassVar[str] = "text_2"

    notes: ClassVar[Mapping[str, str]] = {
        "instruction": "what is looked for; Qwen3's rerankers alone read one",
    }

    #: The task description, for models that were trained with one.
    instruction: str | None = None


class ScoreRequest(ScoringBody):
    """The body of POST /score: one text to pair with each of a list, or two lists to pair up.

    The texts are text_1 and text_2; vLLM also calls them queries and documents, or data_1 and
    data_2.
    """

    notes: ClassVar[Mapping[str, str]] = {
        "text_1": "a text, or a list of as many as `text_2` has",
        "text_2": "a text or a list of texts",
        "queries": "another name of `text_1`",
        "documents": "another name of `text_2`",
        "data_1": "another name of `text_1`",
        "data_2": "another name of `text_2`",
    }
    list_bounds: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("text_1", "text_2", "queries", "documents", "data_1", "data_2"), "max_inputs"
    )

    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    queries: str | Texts | None = None
    documents: str | Texts | None = None
    data_1: str | Texts | None = None
    data_2: str | Texts | None = None

    @property
    def pairs(self) -> list[Pair]:
        """The pairs of texts. Raises InvalidRequestError unless both fields of one form are set,
        and no field of the other two forms is."""
        forms = (
            ("text_1", self.text_1, self.text_2),
            ("queries", self.queries, self.documents),
            ("data_1", self.data_1, self.data_2),
        )
        given = [form for form in forms if form[1] is not None and form[2] is not None]
        if len(given) != 1 or sum(form[i] is not None for form in forms for i in (1, 2)) != 2:
            raise InvalidRequestError("give text_1 and text_2, and no other texts", "text_1")
        ((name, *sides),) = given
        first, second = ([side] if isinstance(side, str) else side or [] for side in sides)
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second) or not first:
            raise InvalidRequestError(
                f"{name} has {len(first)} texts for {len(second)}; give 1 or {len(second)}", name
            )
        return list(zip(first, second, strict=True))


class Document(Body):
    """A document as an object."""

    text: str


Documents = Annotated[list[str | Document], Field(fail_fast=True)]


class RerankRequest(ScoringBody):
    """The body of POST /rerank, which orders documents by how well they answer a query, best
    first."""

    notes: ClassVar[Mapping[str, str]] = {
        "query": "a text",
        "documents": "texts, or objects with a `text`",
        "top_n": "the best ones alone; where left out, or 0: all",
        "return_documents": "false: the answer has indices and scores alone",
    }

    texts_field: ClassVar[str] = "documents"
    list_bounds: ClassVar[Mapping[str, str]] = {"documents": "max_inputs"}

    query: str
    documents: Documents
    #: Number of best documents to return; 0 or None means all.
    top_n: int | None = left_out(minimum=0)
    #: Whether the answer has the documents' texts.
    return_documents: bool = True

    @property
    def texts(self) -> list[str]:
        """The documents' texts."""
        return [each if isinstance(each, str) else each.text for each in self.documents]


class Score(msgspec.Struct):
    """The score of one pair."""

    index: int
    score: float
    object: Literal["score"] = "score"


class Scores(msgspec.Struct):
    """The answer of /score."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage
    object: Literal["list"] = "list"


class DocumentText(msgspec.Struct):
    """A document of an answer."""

    text: str


class RerankResult(msgspec.Struct):
    """A document's score."""

    #: Position of the document in the call.
    index: int
    relevance_score: float
    document: DocumentText | UnsetType = UNSET


class RerankAnswer(msgspec.Struct):
    """The answer of /rerank, best document first. Documents with equal scores keep their order."""

    id: str
    model: str
    results: list[RerankResult]
    usage: PoolingUsage


@router.post("/score", responses=answers(Scores))
@router.post("/v1/score", responses=answers(Scores))
async def create_scores(body: ScoreRequest, http: HTTPRequest) -> Response:
    """The score of each pair of texts."""
    call = PoolingCall(http, body, "score", "score")
    pairs = body.pairs

    def write(scores: list[float], pooled: Pooled) -> Response:
        data = [Score(index, score) for index, score in enumerate(scores)]
        usage, model = usage_of(pooled), call.service.model_name
        return json_response(Scores(pooled.call_id, call.created_s, model, data, usage))

    return await _score(call, body, pairs, write)


@router.post("/rerank", responses=answers(RerankAnswer))
@router.post("/v1/rerank", responses=answers(RerankAnswer))
@router.post("/v2/rerank", responses=answers(RerankAnswer))
async def create_rerank(body: RerankRequest, http: HTTPRequest) -> Response:
    """The documents that answer the query best."""
    if body.top_n is not None and body.top_n < 0:
        raise InvalidRequestError(f"top_n is {body.top_n}, but must be at least 0", "top_n")
    call = PoolingCall(http, body, "rerank", "rerank")
    texts = body.texts

    def write(scores: list[float], pooled: Pooled) -> Response:
        ranked = sorted(enumerate(scores), key=lambda found: -found[1])[: body.top_n or None]
        results = [
            RerankResult(
                index, score, DocumentText(texts[index]) if body.return_documents else UNSET
            )
            for index, score in ranked
        ]
        model = call.service.model_name
        return json_response(RerankAnswer(pooled.call_id, model, results, usage_of(pooled)))

    return await _score(call, body, [(body.query, text) for text in texts], write)


async def _score(
    call: PoolingCall, body: ScoringBody, pairs: Sequence[Pair], write: Write
) -> Response:
    """Score the pairs and write the answer. An InvalidRequestError names the body's field of the
    texts."""
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    call.check_texts(texts, body.texts_field, num_inputs=len(pairs))
    size = sum(map(len, texts))
    with fields_named({"prompt": body.texts_field}):
        if call.inputs.has_scores:
            inputs = await call_for_text(size, _pair_inputs, call, body, pairs)
        else:
            inputs = await call_for_text(size, _text_inputs, call, body, texts)

        async def write_scores(pooled: Pooled) -> Response:
            if call.inputs.has_scores:
                return write([score_of(each) for each in pooled.results], pooled)
            scores = await call.service.work.run(_similarities(texts, pairs, pooled))
            return write(scores, pooled)

        return await call.answer(inputs, write_scores)


def _pair_inputs(call: PoolingCall, body: ScoringBody, pairs: Sequence[Pair]) -> list[PoolingInput]:
    cut, instruction = body.truncation, body.instruction
    return [call.inputs.pair(*pair, instruction=instruction, truncation=cut) for pair in pairs]


def _text_inputs(call: PoolingCall, body: ScoringBody, texts: Sequence[str]) -> list[PoolingInput]:
    if body.instruction is not None:
        raise InvalidRequestError(
            "this model compares embeddings; leave instruction out", "instruction"
        )
    return [call.inputs.embed(text, truncation=body.truncation) for text in texts]


def _similarities(
    texts: Sequence[str], pairs: Sequence[Pair], pooled: Pooled
) -> Generator[None, None, list[float]]:
    """The similarity of each pair. May pause at every yield, since there may be many vectors."""
    results = dict(zip(texts, pooled.results, strict=True))
    scores = []
    for first, second in pairs:
        scores.append(similarity(numbers_of(results[first]), numbers_of(results[second])))
        yield
    return scores
