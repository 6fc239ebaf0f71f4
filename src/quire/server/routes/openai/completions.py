"""POST /v1/completions: text or token ids in, text out.

Streamed and unstreamed answers are made from the same pieces, so their content is equal.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from quire.core.request import prompt_too_long
from quire.engine_client.results import Delta
from quire.errors import InvalidRequestError
from quire.server.generation.answer import (
    LATER,
    Answer,
    AnsweredCall,
    Usage,
    event_of,
    filled,
    generate,
)
from quire.server.generation.body import NOT_FOR_BEAMS, NOT_SUPPORTED, GenerationBody
from quire.server.generation.call_body import Params, Texts, TokenIds, bounded
from quire.server.generation.http_generation import Prompts, blamed_on
from quire.server.http.json_body import MAX_VALUES
from quire.server.http.long_work import call_for_text
from quire.server.http.streaming import event
from quire.server.limits import CallLimits, check_text, too_many_entries
from quire.server.routes.endpoint import Endpoints
from quire.server.routes.openai.logprobs import (
    CompletionLogprobs,
    CompletionLogprobsWriter,
    PromptLogprobs,
    TokenNamer,
    completion_logprobs_json,
    id_name,
    prompt_logprobs_json,
    token_name,
)
from quire.server.routes.openapi import answers
from quire.server.service import Service
from quire.text.fill_in_middle import FillInMiddle

router = Endpoints(generating_paths=("/v1/completions",))

BYTES_PER_LOGPROB = 32
"""Approximate bytes of JSON per log-probability: the token's text, and up to 20 digits."""


class CompletionRequest(GenerationBody):
    """The body of POST /v1/completions."""

    hints: ClassVar[frozenset[str]] = GenerationBody.hints | {"parallel_tool_calls"}
    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = NOT_SUPPORTED
    not_for_beams: ClassVar[Mapping[str, tuple[Any, ...]]] = {**NOT_FOR_BEAMS, "logprobs": ()}

    notes: ClassVar[Mapping[str, str]] = {
        "prompt": "a text, the token ids of one, or a list of either",
        "suffix": "the text after the gap that the answer fills; only where the model's tokenizer"
        " has tokens for that",
        "echo": "the prompt stands before the text",
        "logprobs": "the chosen token's log-probability, and those of this many likeliest "
        "ones, at each position",
        "best_of": "only where it equals `n`",
        "add_special_tokens": "false: a text gets no beginning-of-sequence token and the like",
    }

    max_values: ClassVar[int] = MAX_VALUES  # prompts may be long lists of token ids

    #: A prompt as text or as token ids, or a list of either. Each prompt gets n choices.
    prompt: str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)]
    #: Text after the gap that the answer fills; "" is as None.
    suffix: str | None = None
    #: Whether the text and the logprobs begin with the prompt. If so, max_tokens may be 0, so that
    #: only the prompt is scored.
    echo: bool = False
    #: Number of likeliest tokens to report at each position.
    logprobs: int | None = bounded("logprobs")
    #: Must equal n: choosing the n best of more candidates is not supported yet.
    best_of: int | None = bounded("n")
    # extensions to OpenAI's API
    #: Whether the tokenizer adds its special tokens, such as BOS, to a text prompt.
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list. Raises InvalidRequestError if there is none."""
        prompt: Any = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidRequestError("prompt is an empty list; give at least one", "prompt")
        return [prompt] if isinstance(prompt[0], int) else prompt

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @classmethod
    def check_fields(
        cls, fields: Mapping[str, Any], limits: CallLimits, max_model_len: int
    ) -> None:
        super().check_fields(fields, limits, max_model_len)
        prompt = fields.get("prompt")
        if not isinstance(prompt, list) or not prompt:
            return
        if not isinstance(prompt[0], int | float):
            if len(prompt) > limits.max_prompts:
                raise too_many_entries("prompt", prompt, limits.max_prompts)
        elif len(prompt) >= max_model_len and fields.get("truncate_prompt_tokens") is None:
            raise prompt_too_long(len(prompt), max_model_len)

    @property
    def scores_only(self) -> bool:
        """Whether the answer is only the echoed prompt. The engine still generates one token."""
        return self.echo and self.max_tokens == 0 and not self.use_beam_search

    def to_params(self) -> Params:
        """Raises InvalidRequestError."""
        if self.suffix and (self.echo or self.is_truncated):
            other = "echo" if self.echo else "truncate_prompt_tokens"
            raise InvalidRequestError(
                f"suffix and {other} are both set, but don't go together; leave one out", "suffix"
            )
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequestError(
                f"best_of is {self.best_of}, but choosing the best of more than n is not supported "
                "yet; leave it out",
                "best_of",
            )
        echoed = self.logprobs if self.echo else None
        wanted = [count for count in (self.prompt_logprobs, echoed) if count is not None]
        prompt_logprobs = -1 if -1 in wanted else max(wanted, default=None)  # -1 means all
        if self.scores_only:
            if self.min_tokens:
                raise InvalidRequestError(
                    f"min_tokens is {self.min_tokens}, above max_tokens, 0", "min_tokens"
                )
            return self._make_params(1, None, prompt_logprobs=prompt_logprobs)
        max_tokens = 16 if self.max_tokens is None else self.max_tokens
        return self._make_params(max_tokens, self.logprobs, prompt_logprobs=prompt_logprobs)


class CompletionChoice(msgspec.Struct):
    """A choice, or a piece of a choice in a stream's chunk.

    Fields that were not asked for are null in an unstreamed answer, as clients of vLLM expect, and
    missing in a chunk.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    #: Stop string or stop token that ended the choice; null if it ended otherwise.
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    #: Token ids of the prompt, in a choice's first piece.
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    #: Token ids of this piece.
    token_ids: list[int] | UnsetType | None = UNSET


class Completion(msgspec.Struct):
    """The unstreamed answer, or one chunk of a stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str | None = None
    service_tier: UnsetType | None = UNSET
    kv_transfer_params: UnsetType | None = UNSET


@router.post("/v1/completions", responses=answers(Completion, streams=True))
async def create_completion(body: CompletionRequest, http: HTTPRequest) -> Response:
    """Continue each prompt n times."""
    return await generate(http, body, _CompletionAnswer)


def _fill_prompts(service: Service, body: CompletionRequest, suffix: str) -> Prompts:
    """The prompts of a gap before `suffix`."""
    fill = FillInMiddle(service.tokenizer)
    with blamed_on("prompt"):
        found = [
            fill.encode(prompt, suffix, add_special_tokens=body.add_special_tokens)
            for prompt in body.prompts
        ]
    return Prompts(found, end_token_ids=fill.end_token_ids)


def _without_special_tokens(service: Service, body: CompletionRequest) -> list[Any]:
    with blamed_on("prompt"):
        return [
            service.tokenizer.encode(prompt, add_special_tokens=False)
            if isinstance(prompt, str)
            else prompt
            for prompt in body.prompts
        ]


class _CompletionAnswer(Answer[CompletionRequest]):
    """The answer in OpenAI's form. Invariant: if the caller asked for an echo, the first piece of
    each choice begins with the prompt."""

    id_prefix = "cmpl"
    operation = "text_completion"
    bytes_per_logprob = BYTES_PER_LOGPROB

    @classmethod
    async def prompts(cls, service: Service, body: CompletionRequest) -> Prompts:
        longest, is_cut = service.engine.limits.max_model_len, body.is_truncated
        for prompt in body.prompts:
            if isinstance(prompt, str):
                check_text(prompt, service.tokenizer, longest, "prompt", is_truncated=is_cut)
        if body.suffix:
            check_text(body.suffix, service.tokenizer, longest, "suffix", is_truncated=False)
            size = len(body.suffix) * len(body.prompts) + sum(map(len, body.prompts))
            return await call_for_text(size, _fill_prompts, service, body, body.suffix)
        if body.add_special_tokens:
            return Prompts(body.prompts)
        num_characters = sum(len(prompt) for prompt in body.prompts)
        return Prompts(await call_for_text(num_characters, _without_special_tokens, service, body))

    def __init__(self, call: AnsweredCall[CompletionRequest]) -> None:
        super().__init__(call)
        self._writers = self._make_writers(call.body.logprobs)

    def _whole(self, choices: list[Any]) -> Completion:
        answer = self._answer(choices, self._usage())
        answer.service_tier = answer.kv_transfer_params = None
        return answer

    def _whole_choice(self, choice: int, delta: Delta) -> Iterable[bytes]:
        counted = self._counted(delta)
        with_echo = self._echoes(choice)
        piece = self._piece(choice, counted)
        parts: list[Iterable[bytes]] = []
        if self._has_logprobs(counted, with_echo):
            piece.logprobs = LATER
            parts.append(self._logprobs_json(choice, counted, with_echo))
        if self._body.prompt_logprobs is not None:
            piece.prompt_logprobs = LATER
            entries = self._generation.prompt_entries(choice)
            num_top = self._body.prompt_logprobs
            parts.append(prompt_logprobs_json(self._service.tokenizer, entries, num_top))
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

    def _end_events(self) -> Iterable[bytes]:
        return [event(self._answer([], self._usage()))] if self._body.include_usage else ()

    def _counted(self, delta: Delta) -> Delta:
        """Count a delta's tokens; returns the delta that the client gets."""
        if self._body.scores_only:
            return Delta(finish_reason=None if delta.finish_reason is None else "length")
        self._num_generated += len(delta.token_ids)
        return delta

    def _has_news(self, delta: Delta) -> bool:
        """Whether a delta has anything for the client. It may be empty, since text that may begin a
        stop string is held back."""
        return bool(
            delta.text
            or delta.logprobs
            or delta.finish_reason
            or (self._body.return_token_ids and delta.token_ids)
        )

    def _echoes(self, choice: int) -> bool:
        """Whether the next piece of a choice begins with the prompt."""
        return self._body.echo and choice in self._unbegun

    def _piece(self, choice: int, delta: Delta) -> CompletionChoice:
        """The next piece of a choice, without its log-probabilities."""
        echoes = self._echoes(choice)
        begins = self._is_first_piece(choice)
        nothing = UNSET if self._body.stream else None
        return CompletionChoice(
            choice,
            self._prompt_text(choice) + delta.text if echoes else delta.text,
            None,
            delta.finish_reason,
            delta.stop_reason,
            prompt_logprobs=nothing,
            prompt_token_ids=(self._prompt_token_ids(choice) if begins else None) or nothing,
            token_ids=nothing if (ids := self._token_ids(delta)) is None else ids,
        )

    def _has_logprobs(self, delta: Delta, with_echo: bool) -> bool:
        return bool(self._writers) and (with_echo or bool(delta.logprobs))

    def _logprobs_json(self, choice: int, delta: Delta, with_echo: bool) -> Iterable[bytes]:
        return completion_logprobs_json(self._logprobs(choice, delta, with_echo))

    def _logprobs(self, choice: int, delta: Delta, with_echo: bool) -> Iterator[CompletionLogprobs]:
        writer = self._writers[choice]
        if with_echo:
            yield from writer.write_echo(
                self._results[choice // self._generation.params.n].prompt_token_ids,
                self._generation.prompt_entries(choice),
                self._prompt_text(choice),
                is_given=self._given_text(choice) is not None,
            )
        are_listed = self._body.logprob_token_ids is not None
        for chunk in delta.logprobs.chunks():
            yield writer.write(chunk, are_listed=are_listed)

    def _make_writers(self, num_top: int | None) -> list[CompletionLogprobsWriter]:
        """A writer for each choice; empty if no logprobs are wanted."""
        if num_top is None:
            return []
        name: TokenNamer = partial(token_name, self._service.tokenizer)
        if self._body.return_tokens_as_token_ids:
            name = id_name
        return [
            CompletionLogprobsWriter(
                self._service.tokenizer,
                result.prompt_token_ids,
                num_top=num_top,
                skip_special_tokens=self._generation.params.skip_special_tokens,
                name=name,
            )
            for result in self._results
            for _ in result.outputs
        ]

    def _prompt_text(self, choice: int) -> str:
        given = self._given_text(choice)
        if given is not None:
            return given
        return self._service.tokenizer.decode(
            self._results[choice // self._generation.params.n].prompt_token_ids,
            skip_special_tokens=self._generation.params.skip_special_tokens,
        )

    def _given_text(self, choice: int) -> str | None:
        """The prompt as the caller sent it; None if it was token ids or is_truncated is set."""
        prompt = self._body.prompts[choice // self._generation.params.n]
        return prompt if isinstance(prompt, str) and not self._body.is_truncated else None

    def _answer(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> Completion:
        return Completion(
            self._call_id,
            self._created_s,
            self._service.answered_name(self._body.model),
            choices,
            usage,
            system_fingerprint=self._service.system_fingerprint,
        )
