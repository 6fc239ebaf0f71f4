"""POST /v1/completions: text or token ids in, text out.

A streamed answer and a whole one are made of the same pieces, so they say the same.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from quire.engine.outputs import Delta
from quire.server.api_docs import answers
from quire.server.call import Call
from quire.server.generation import Generation, blamed_on, new_call_id, prepare
from quire.server.json_body import JSONRoute
from quire.server.limits import check_text, check_whole_answer
from quire.server.logprobs import CompletionLogprobsWriter, extend_logprobs
from quire.server.protocol import CompletionRequest
from quire.server.responses import Completion, CompletionChoice, CompletionLogprobs, Usage
from quire.server.service import Service, call_for_text, service_of
from quire.server.streaming import EventStream, answer, event
from quire.server.tenancy import options_of

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/completions", responses=answers(Completion, streams=True))
async def create_completion(body: CompletionRequest, http: HTTPRequest) -> Response:
    """Continue each prompt n times."""
    service = service_of(http)
    service.check_model(body.model)
    service.limits.check(body, service.engine.limits.max_logprobs)
    wish = body.to_wish()
    call_id = new_call_id("cmpl")
    options = options_of(http, body)
    prompts = await _prompts(service, body)
    generation = await prepare(service, http, call_id, prompts, wish, options)
    call = _CompletionCall(service, body, generation, call_id)
    if body.stream:
        return EventStream(call.events(), service.keep_alive_s)
    check_whole_answer(generation.requests, service.engine.limits.max_model_len)
    return await answer(http.receive, call.collect())


async def _prompts(service: Service, body: CompletionRequest) -> list[str | list[int]]:
    """As the engine takes them: token ids, or texts, which get their special tokens there."""
    for prompt in body.prompts:
        if isinstance(prompt, str):
            check_text(prompt, service.tokenizer, service.engine.limits.max_model_len, "prompt")
    if body.add_special_tokens:
        return body.prompts
    num_characters = sum(len(prompt) for prompt in body.prompts)
    return await call_for_text(num_characters, _without_special_tokens, service, body)


def _without_special_tokens(service: Service, body: CompletionRequest) -> list[Any]:
    with blamed_on("prompt"):
        return [
            service.tokenizer.encode(prompt, add_special_tokens=False)
            if isinstance(prompt, str)
            else prompt
            for prompt in body.prompts
        ]


class _CompletionCall(Call[CompletionRequest]):
    """One call. Invariant: a choice's echo, if asked for, is at the head of its first piece."""

    def __init__(
        self, service: Service, body: CompletionRequest, generation: Generation, call_id: str
    ) -> None:
        super().__init__(service, body, generation, call_id)
        self._writers = self._make_writers(body.logprobs)

    async def collect(self) -> Completion:
        """The whole answer."""
        async with self._generation as generation:
            choices = []
            for index, delta in await generation.rest():
                choices.append(self._piece(index, self._counted(delta)))
                await asyncio.sleep(0)  # others go on: one with log-probabilities takes long
        for choice in choices:
            choice.prompt_logprobs = self._prompt_logprobs(choice.index)
        return self._answer(choices, self._usage())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events."""
        async with self._generation as generation:
            async for batch in generation.batches():
                if events := b"".join(self._events(batch)):
                    yield events
        if self._body.include_usage:
            yield event(self._answer([], self._usage()))

    def _events(self, batch: Iterable[tuple[int, Delta]]) -> Iterator[bytes]:
        for choice, whole_delta in batch:
            delta = self._counted(whole_delta)
            if self._has_news(delta) or (self._body.echo and choice in self._unbegun):
                yield event(self._answer([self._piece(choice, delta)], self._chunk_usage()))

    def _counted(self, delta: Delta) -> Delta:
        """What is answered of a delta, its tokens counted."""
        if self._body.scores_only:
            return Delta(finish_reason=None if delta.finish_reason is None else "length")
        self._num_generated += len(delta.token_ids)
        return delta

    def _piece(self, choice: int, delta: Delta) -> CompletionChoice:
        begins = self._begins(choice)
        echoes = begins and self._body.echo
        return CompletionChoice(
            choice,
            self._prompt_text(choice) + delta.text if echoes else delta.text,
            self._logprobs(choice, delta, echoes) if self._writers else None,
            delta.finish_reason,
            delta.stop_reason,
            prompt_token_ids=self._prompt_token_ids(choice) if begins else UNSET,
            token_ids=self._token_ids(delta),
        )

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
                () if self._body.echo else self._result(choice).prompt_token_ids,
                num_top=num_top,
                skip_special_tokens=self._generation.params.skip_special_tokens,
            )
            for choice in range(self._generation.num_choices)
        ]

    def _prompt_text(self, choice: int) -> str:
        prompt = self._body.prompts[choice // self._generation.params.n]
        if isinstance(prompt, str):
            return prompt
        return self._service.tokenizer.decode(
            prompt, skip_special_tokens=self._generation.params.skip_special_tokens
        )

    def _answer(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> Completion:
        return Completion(
            self._call_id,
            self._created_s,
            self._service.model_name,
            choices,
            usage,
            system_fingerprint=self._service.system_fingerprint,
        )
