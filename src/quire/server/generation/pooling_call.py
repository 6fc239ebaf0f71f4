"""Calls that embed or score: their fields, requests and results.

Each input of a call becomes one engine request. Like requests for text, they count against the
tenant's bounds, have a deadline and metrics, and run again after a crash of the engine. Called by
the routes.
"""

import time
from abc import ABC
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.engine_client.inputs import MAX_NAME_LENGTH
from quire.engine_client.outputs import RequestAssembler
from quire.engine_client.pooling_inputs import PoolingInput, PoolingInputs, Truncation
from quire.errors import InvalidRequestError
from quire.server.generation.call_body import Priority, Seconds, left_out
from quire.server.generation.http_generation import (
    Caller,
    HTTPGeneration,
    new_call_id,
    options_of,
)
from quire.server.http.body import Body
from quire.server.http.errors import CLIENT_GONE_STATUS
from quire.server.http.streaming import ClientGoneError, unless_disconnected
from quire.server.limits import check_text, too_many_entries
from quire.server.service import Service, service_of

HINTS = frozenset({"metadata", "request_id", "safety_identifier", "service_tier", "user"})
"""Fields that are accepted although they don't change the result."""

WINDOW = 256
"""Maximum number of a call's inputs that are in the engine at once."""

_NOTHING_SAMPLED = SamplingParams(max_tokens=1)


class PoolingBody(Body, ABC):
    """The fields of all bodies that embed or score."""

    notes: ClassVar[Mapping[str, str]] = {
        "model": "the name in `/v1/models`",
        "truncate_prompt_tokens": "longer inputs are cut to this many tokens; -1: to as many as the"
        " model takes; where left out they are refused",
        "truncation_side": "`left`: the last tokens are kept, not the first",
        "priority": "smaller goes first, under the priority policy",
        "cache_salt": "prefixes are shared only among calls with the same",
        "deadline_s": "seconds after which the call is ended with an error",
    }

    hints: ClassVar[frozenset[str]] = HINTS

    model: str | None = None
    #: Maximum number of tokens of an input. A longer input loses its last tokens, or its first with
    #: the truncation_side "left". -1 means the model's maximum; None means that longer inputs are
    #: refused.
    truncate_prompt_tokens: int | None = left_out(minimum=-1)
    truncation_side: Literal["left", "right"] | None = None
    # extensions to OpenAI's API
    priority: Priority = 0
    cache_salt: str | None = left_out(maxLength=MAX_NAME_LENGTH)
    deadline_s: Seconds | None = None

    @property
    def truncation(self) -> Truncation:
        """The truncation of inputs that are too long."""
        return Truncation(self.truncate_prompt_tokens, keeps_end=self.truncation_side == "left")


class Pooled(NamedTuple):
    """The results of a call."""

    call_id: str
    #: The engine's result for each input.
    results: list[bytes]
    #: Prompt tokens of all inputs together.
    num_tokens: int


class PoolingUsage(msgspec.Struct):
    """The number of tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


def usage_of(pooled: Pooled) -> PoolingUsage:
    """The usage in the answer."""
    return PoolingUsage(pooled.num_tokens, pooled.num_tokens)


class PoolingCall:
    """One HTTP call that embeds or scores, from its body to its results."""

    def __init__(
        self, http: HTTPRequest, body: PoolingBody, id_prefix: str, operation: str
    ) -> None:
        """Raises UnknownModelError, ServerDrainingError, InvalidRequestError."""
        self.service: Service = service_of(http)
        self.service.check_model(body.model)
        if body.model in self.service.adapters:
            raise InvalidRequestError(
                f"the model {body.model!r:.80} is an adapter, which generates text; name the model"
                " itself",
                "model",
            )
        self.service.check_accepting()
        self.inputs = PoolingInputs(self.service.tokenizer, self.service.engine.limits)
        self._is_truncated = body.truncation.most is not None
        self._http = http
        self._options = options_of(http, body, self.service)
        self._created_s = int(time.time())
        self._caller = Caller.of(http, new_call_id(id_prefix), operation)

    @property
    def created_s(self) -> int:
        """Time of the call's arrival in seconds since 1970, as in OpenAI's answers."""
        return self._created_s

    def check_texts(
        self, texts: Sequence[Any], param: str, *, num_inputs: int | None = None
    ) -> None:
        """Check the inputs before any work is done for them.

        `num_inputs` is the number of inputs made from the texts; None means one per text. Raises
        InvalidRequestError, OverloadedError if the server has no room.
        """
        count = len(texts) if num_inputs is None else num_inputs
        if not count:
            raise InvalidRequestError(f"{param} is empty; give at least one", param)
        most = self.service.limits.max_inputs
        if count > most:
            raise too_many_entries(param, range(count), most)
        self.service.engine.check_room(min(count, WINDOW))
        longest = self.service.engine.limits.max_model_len
        for text in texts:
            if isinstance(text, str):
                is_cut = self._is_truncated
                check_text(text, self.service.tokenizer, longest, param, is_truncated=is_cut)

    async def answer(
        self, given: Sequence[PoolingInput], write: Callable[["Pooled"], Awaitable[Response]]
    ) -> Response:
        """Run the inputs; returns the response that `write` makes from the results, or an empty
        response if the client disconnects. Raises the same errors as `HTTPGeneration`."""
        try:
            pooled = await unless_disconnected(self._http.receive, self._run(given))
        except ClientGoneError:
            return Response(status_code=CLIENT_GONE_STATUS)
        return await write(pooled)

    async def _run(self, given: Sequence[PoolingInput]) -> "Pooled":
        """Run a window of the inputs at a time, so that a long list of inputs delays other calls no
        more than a short list."""
        requests = await self.service.work.run(self._requests(given))
        results: list[bytes] = []
        for first in range(0, len(requests), WINDOW):
            assemblers = [
                RequestAssembler(request, _NOTHING_SAMPLED, None, None, deltas_only=True)
                for request in requests[first : first + WINDOW]
            ]
            await self._run_window(assemblers)
            results += [each.pooled for each in assemblers if each.pooled is not None]
        assert len(results) == len(requests), "a pooling request ends with its result"
        num_tokens = sum(len(request.prompt_token_ids) for request in requests)
        return Pooled(self._caller.call_id, results, num_tokens)

    def _requests(self, given: Sequence[PoolingInput]) -> Generator[None, None, list[Request]]:
        """The requests of the inputs. May pause at every yield."""
        limits, call_id = self.service.engine.limits, self._caller.call_id
        found = []
        for index, each in enumerate(given):
            found.append(each.request(f"{call_id}-{index}", limits, self._options))
            yield
        return found

    async def _run_window(self, assemblers: Sequence[RequestAssembler]) -> None:
        generation = HTTPGeneration(self.service, assemblers, _NOTHING_SAMPLED, self._caller)
        async with generation:
            await generation.rest()
