"""POST /v1/completions: text or token ids in, text out.

A streamed answer and a whole one are made of the same pieces, so they say the same.
"""

import time
from collections.abc import AsyncGenerator

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from starlette.responses import Response

from quire.engine.outputs import Delta, RequestOutput
from quire.server.generation import Generation, new_call_id, prepare
from quire.server.logprobs import CompletionLogprobsWriter, extend_logprobs, prompt_logprobs_json
from quire.server.protocol import CompletionRequest
from quire.server.responses import Completion, CompletionChoice, CompletionLogprobs, usage_of
from quire.server.service import Service, service_of
from quire.server.streaming import EventStream, answer, event
from quire.server.tenancy import options_of

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, http: HTTPRequest) -> Response:
    """Continue each prompt n times."""
    service = service_of(http)
    service.check_model(body.model)
    wish = body.to_wish()
    call_id = new_call_id("cmpl")
    options = options_of(http, body.priority, body.cache_salt)
    generation = await prepare(service, call_id, body.prompts, wish, options)
    call = _CompletionCall(service, body, generation, call_id)
    if body.stream:
        return EventStream(call.events())
    return await answer(http.receive, call.collect())


class _CompletionCall:
    """One call. Invariant: a choice's echo, if asked for, is at the head of its first piece."""

    def __init__(
        self, service: Service, body: CompletionRequest, generation: Generation, call_id: str
    ) -> None:
        self._service = service
        self._body = body
        self._generation = generation
        self._call_id = call_id
        self._created_s = int(time.time())
        self._to_echo = set(range(generation.num_choices)) if body.echo else set()
        self._writers = self._make_writers(body.logprobs)

    async def collect(self) -> Completion:
        """The whole answer."""
        choices: dict[int, CompletionChoice] = {}
        async for piece in self._pieces():
            choices[piece.index] = _joined(choices.get(piece.index), piece)
        ordered = [choice for _, choice in sorted(choices.items())]
        if self._body.prompt_logprobs is not None:
            for choice in ordered:
                self._attach_prompt_logprobs(choice, self._body.prompt_logprobs)
        whole = self._answer(ordered)
        whole.usage = usage_of(self._generation.results)
        return whole

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events."""
        async for piece in self._pieces():
            chunk = self._answer([piece])
            if self._body.include_usage:
                chunk.usage = None
            yield event(chunk)
        if self._body.include_usage:
            last = self._answer([])
            last.usage = usage_of(self._generation.results)
            yield event(last)

    async def _pieces(self) -> AsyncGenerator[CompletionChoice, None]:
        async with self._generation as generation:
            async for choice, delta in generation.deltas():
                piece = self._piece(choice, delta)
                if piece.text or piece.logprobs is not None or piece.finish_reason is not None:
                    yield piece

    def _piece(self, choice: int, delta: Delta) -> CompletionChoice:
        text, logprobs = delta.text, None
        is_first = choice in self._to_echo
        self._to_echo.discard(choice)
        if is_first:
            text = self._prompt_text(choice) + text
        if self._writers:
            logprobs = self._logprobs(choice, delta, is_first)
        return CompletionChoice(choice, text, logprobs, delta.finish_reason, delta.stop_reason)

    def _logprobs(self, choice: int, delta: Delta, with_echo: bool) -> CompletionLogprobs | None:
        writer, result = self._writers[choice], self._result(choice)
        if with_echo:
            assert result.prompt_logprobs is not None, "they come with the first output"
            echoed = writer.echo(result.prompt_token_ids, result.prompt_logprobs)
            extend_logprobs(echoed, writer.write(delta.logprobs))
            return echoed
        return writer.write(delta.logprobs) if delta.logprobs else None

    def _make_writers(self, num_top: int | None) -> list[CompletionLogprobsWriter]:
        """One for each choice, none where no logprobs are wanted."""
        if num_top is None:
            return []
        return [
            CompletionLogprobsWriter(
                self._service.tokenizer,
                () if self._to_echo else self._result(choice).prompt_token_ids,
                num_top=num_top,
                skip_special_tokens=self._generation.params.skip_special_tokens,
            )
            for choice in range(self._generation.num_choices)
        ]

    def _result(self, choice: int) -> RequestOutput:
        return self._generation.results[choice // self._generation.params.n]

    def _prompt_text(self, choice: int) -> str:
        result = self._result(choice)
        if result.prompt is not None:
            return result.prompt
        return self._service.tokenizer.decode(
            result.prompt_token_ids,
            skip_special_tokens=self._generation.params.skip_special_tokens,
        )

    def _attach_prompt_logprobs(self, choice: CompletionChoice, num_top: int) -> None:
        result = self._result(choice.index)
        assert result.prompt_logprobs is not None, "they come with the first output"
        choice.prompt_logprobs = prompt_logprobs_json(
            result.prompt_token_ids, result.prompt_logprobs, num_top
        )

    def _answer(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(self._call_id, self._created_s, self._service.model_name, choices)


def _joined(before: CompletionChoice | None, piece: CompletionChoice) -> CompletionChoice:
    """`before`, grown by the next piece of the same choice."""
    if before is None:
        return piece
    before.text += piece.text
    if before.logprobs is None or piece.logprobs is None:
        before.logprobs = before.logprobs or piece.logprobs
    else:
        extend_logprobs(before.logprobs, piece.logprobs)
    before.finish_reason, before.stop_reason = piece.finish_reason, piece.stop_reason
    return before
