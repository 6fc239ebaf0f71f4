"""One HTTP call for generated text while it is answered, whatever the API family.

Called by `completions` and `chat`, which know the shapes of the answers.
"""

import time
from collections.abc import Sequence
from typing import Generic, TypeVar

from msgspec import UNSET, UnsetType

from quire.engine.outputs import Delta, RequestOutput
from quire.server.generation import Generation
from quire.server.logprobs import prompt_logprobs_json
from quire.server.protocol import GenerationBody
from quire.server.responses import PromptLogprobs, Usage, usage_of
from quire.server.service import Service

BodyT = TypeVar("BodyT", bound=GenerationBody)


class Call(Generic[BodyT]):
    """Base of the families' calls.

    Invariant: _num_generated tokens are in what was answered so far; the choices in _unbegun have
    had no piece yet.
    """

    def __init__(self, service: Service, body: BodyT, generation: Generation, call_id: str) -> None:
        self._service = service
        self._body = body
        self._generation = generation
        self._call_id = call_id
        self._created_s = int(time.time())
        self._results: Sequence[RequestOutput] = generation.results
        self._num_generated = 0
        self._unbegun = set(range(generation.num_choices))

    def _begins(self, choice: int) -> bool:
        """Whether the next piece of a choice is its first; the piece after that is not."""
        if choice not in self._unbegun:
            return False
        self._unbegun.discard(choice)
        return True

    def _result(self, choice: int) -> RequestOutput:
        return self._results[choice // self._generation.params.n]

    def _has_news(self, delta: Delta) -> bool:
        """Whether a client sees anything of it. Text may be held back, as part of a stop string."""
        return bool(
            delta.text
            or delta.logprobs
            or delta.finish_reason
            or (self._body.return_token_ids and delta.token_ids)
        )

    def _token_ids(self, delta: Delta) -> list[int] | UnsetType:
        return delta.token_ids if self._body.return_token_ids else UNSET

    def _prompt_token_ids(self, choice: int) -> list[int] | UnsetType:
        return self._result(choice).prompt_token_ids if self._body.return_token_ids else UNSET

    def _prompt_logprobs(self, choice: int) -> PromptLogprobs | UnsetType:
        """Of a choice that has ended."""
        if self._body.prompt_logprobs is None:
            return UNSET
        result = self._result(choice)
        assert result.prompt_logprobs is not None, "they come with the first output"
        return prompt_logprobs_json(
            result.prompt_token_ids, result.prompt_logprobs, self._body.prompt_logprobs
        )

    def _usage(self) -> Usage:
        return usage_of(self._results, self._num_generated)

    def _chunk_usage(self) -> Usage | UnsetType | None:
        """What OpenAI's chunks have as usage before the last one, and what ours may have."""
        if self._body.continuous_usage:
            return self._usage()
        return None if self._body.include_usage else UNSET
