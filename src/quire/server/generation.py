"""The requests of one HTTP call while they run: from prompts to text, whatever the API family.

One call becomes one engine request per prompt, and n choices of each: choice = prompt * n + branch.
Called by `completions` and `chat`. Knows no JSON.
"""

import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from quire.core.request import Request
from quire.core.sampling_params import Wish, as_sampling_params
from quire.engine.async_engine import RequestStream
from quire.engine.inputs import RequestOptions
from quire.engine.outputs import Delta, RequestAssembler, RequestOutput
from quire.errors import InvalidRequestError, StepFailedError
from quire.server.service import Service, call_for_text


class Generation:
    """One HTTP call's requests. Use it with `async with`: leaving aborts what still runs.

    Invariant: a stop string that ends a branch here ends it in the engine, too.
    """

    def __init__(
        self,
        service: Service,
        requests: Sequence[Request],
        wish: Wish,
        texts: Sequence[str | None],
    ) -> None:
        """texts: of the prompts, None where the client sent token ids."""
        self.requests = requests
        self.params = params = as_sampling_params(wish)
        self._engine = service.engine
        self._assemblers = {
            request.request_id: RequestAssembler(request, wish, service.tokenizer, text)
            for request, text in zip(requests, texts, strict=True)
        }
        self._first_choice = {
            request.request_id: index * params.n for index, request in enumerate(requests)
        }
        self._stream: RequestStream | None = None

    @property
    def num_choices(self) -> int:
        return len(self.requests) * self.params.n

    @property
    def results(self) -> list[RequestOutput]:
        """Everything that has come so far, by prompt."""
        return [assembler.output for assembler in self._assemblers.values()]

    async def __aenter__(self) -> Self:
        """Send the requests to the engine. Raises OverloadedError, EngineDeadError."""
        self._stream = self._engine.generate(*self.requests)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._stream is not None:
            self._stream.close()

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """(choice, what is new in it) as it comes, until every choice has finished.

        Raises what the engine refused a request with, StepFailedError, EngineDeadError.
        """
        assert self._stream is not None, "deltas are read inside `async with`"
        async for output in self._stream:
            assembler = self._assemblers[output.request_id]
            for branch in assembler.push(output):
                self._stream.abort_branch(output.request_id, branch)
            if assembler.output.error is not None:
                raise StepFailedError(assembler.output.error)
            delta = assembler.take_delta(output.branch_index)
            yield self._first_choice[output.request_id] + output.branch_index, delta


async def prepare(
    service: Service,
    call_id: str,
    prompts: Sequence[str | list[int]],
    wish: Wish,
    options: RequestOptions,
) -> Generation:
    """Tokenize and check the prompts. Raises InvalidRequestError."""
    size = sum(len(prompt) for prompt in prompts)  # in characters or token ids: both are read
    requests = await call_for_text(size, _make_requests, service, call_id, prompts, wish, options)
    texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
    return Generation(service, requests, wish, texts)


@contextmanager
def blamed_on(param: str) -> Iterator[None]:
    """Name the field in errors about a text that does not know which field it came from."""
    try:
        yield
    except InvalidRequestError as error:
        error.param = error.param or param
        raise


def new_call_id(prefix: str) -> str:
    """An id that no other call has, in OpenAI's form."""
    return f"{prefix}-{uuid.uuid4().hex}"


def _make_requests(
    service: Service,
    call_id: str,
    prompts: Sequence[str | list[int]],
    wish: Wish,
    options: RequestOptions,
) -> list[Request]:
    inputs = service.inputs
    with blamed_on("prompt"):
        return [
            inputs.make_request(
                f"{call_id}-{index}", prompt, wish, seed=service.draw_seed(), options=options
            )
            for index, prompt in enumerate(prompts)
        ]
