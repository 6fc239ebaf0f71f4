"""POST /v1/completions: text or token ids in, text out.

A streamed answer and a whole one are made of the same pieces, so they say the same.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from quire.engine_client.outputs import Delta
from quire.server.generation.answer import LATER, Call, event_of, filled
from quire.server.generation.body import CompletionRequest
from quire.server.generation.http_generation import HTTPGeneration, blamed_on, new_call_id, prepare
from quire.server.generation.limits import check_text, check_whole_answer
from quire.server.http.json_body import JSONRoute
from quire.server.http.streaming import event
from quire.server.routes.openai.logprobs import CompletionLogprobsWriter, completion_logprobs_json
from quire.server.routes.openai.shapes import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Usage,
)
from quire.server.routes.openapi import answers
from quire.server.service import Service, call_for_text, service_of
from quire.server.tenants.tenancy import options_of

router = APIRouter(route_class=JSONRoute)

BYTES_PER_LOGPROB = 32
"""In the answer, about: a token's text in quotation marks, and up to 20 digits."""


@router.post("/v1/completions", responses=answers(Completion, streams=True))
async def create_completion(body: CompletionRequest, http: HTTPRequest) -> Response:
    """Continue each prompt n times."""
    service = service_of(http)
    service.check_model(body.model)
    service.limits.check(body, service.engine.limits.max_logprobs)
    params = body.to_params()
    call_id = new_call_id("cmpl")
    options = options_of(http, body)
    prompts = await _prompts(service, body)
    generation = await prepare(service, http, call_id, prompts, params, options)
    call = _CompletionCall(service, body, generation, call_id)
    if body.stream:
        return call.stream()
    check_whole_answer(
        generation.requests,
        service.engine.limits.max_model_len,
        bytes_per_logprob=BYTES_PER_LOGPROB,
    )
    return await call.answer(http.receive)


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
        self, service: Service, body: CompletionRequest, generation: HTTPGeneration, call_id: str
    ) -> None:
        super().__init__(service, body, generation, call_id)
        self._writers = self._make_writers(body.logprobs)

    def _whole(self, choices: list[Any]) -> Completion:
        return self._answer(choices, self._usage())

    def _whole_choice(self, choice: int, delta: Delta) -> Iterable[bytes]:
        counted = self._counted(delta)
        with_echo = self._echoes(choice)
        piece = self._piece(choice, counted)
        parts = []
        if self._has_logprobs(counted, with_echo):
            piece.logprobs = LATER
            parts.append(self._logprobs_json(choice, counted, with_echo))
        if self._body.prompt_logprobs is not None:
            piece.prompt_logprobs = LATER
            parts.append(self._prompt_logprobs(choice))
        return filled(piece, *parts)

    def _events(self, choice: int, delta: Delta) -> Iterable[bytes]:
        counted = self._counted(delta)
        with_echo = self._echoes(choice)
        if not (with_echo or self._has_news(counted)):
            return ()
        piece = self._piece(choice, counted)
        if not self._has_logprobs(counted, with_echo):
            return (event(self._answer([piece], self._chunk_usage())),)
        piece.logprobs = LATER
        return event_of(
            filled(
                self._answer([piece], self._chunk_usage()),
                self._logprobs_json(choice, counted, with_echo),
            )
        )

    def _usage_event(self) -> bytes:
        return event(self._answer([], self._usage()))

    def _counted(self, delta: Delta) -> Delta:
        """What is answered of a delta, its tokens counted."""
        if self._body.scores_only:
            return Delta(finish_reason=None if delta.finish_reason is None else "length")
        self._num_generated += len(delta.token_ids)
        return delta

    def _echoes(self, choice: int) -> bool:
        """Whether the next piece of a choice begins with the prompt."""
        return self._body.echo and choice in self._unbegun

    def _piece(self, choice: int, delta: Delta) -> CompletionChoice:
        """But for its log-probabilities."""
        echoes = self._echoes(choice)
        begins = self._begins(choice)
        return CompletionChoice(
            choice,
            self._prompt_text(choice) + delta.text if echoes else delta.text,
            None,
            delta.finish_reason,
            delta.stop_reason,
            prompt_token_ids=self._prompt_token_ids(choice) if begins else UNSET,
            token_ids=self._token_ids(delta),
        )

    def _has_logprobs(self, delta: Delta, with_echo: bool) -> bool:
        return bool(self._writers) and (with_echo or bool(delta.logprobs))

    def _logprobs_json(self, choice: int, delta: Delta, with_echo: bool) -> Iterable[bytes]:
        return completion_logprobs_json(self._logprobs(choice, delta, with_echo))

    def _logprobs(self, choice: int, delta: Delta, with_echo: bool) -> Iterator[CompletionLogprobs]:
        writer = self._writers[choice]
        if with_echo:
            yield writer.write_first(self._result(choice).prompt_token_ids[0])
            for chunk in self._generation.prompt_entries(choice).chunks():
                yield writer.write(chunk)
        for chunk in delta.logprobs.chunks():
            yield writer.write(chunk)

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
