"""Prompts and wishes -> requests in token ids. No torch: the HTTP front uses it too."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.core.request import Request, check_prompt
from quire.core.sampling_params import ModelLimits, SamplingParams, resolve
from quire.errors import InvalidRequestError
from quire.text.tokenizer import Tokenizer


class InputProcessor:
    """Makes requests for one model."""

    def __init__(self, tokenizer: Tokenizer | None, limits: ModelLimits) -> None:
        """tokenizer: None serves token ids only."""
        self._tokenizer = tokenizer
        self._limits = limits

    def make_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        priority: int = 0,
        cache_domain: str = "",
    ) -> Request:
        """Tokenize (text), resolve and check. seed: used where params.seed is None.

        Raises InvalidRequestError; whether the KV blocks suffice is checked by `Engine.add`.
        """
        token_ids = self.tokenize(prompt)
        check_prompt(token_ids, self._limits)
        decoding = resolve(
            params,
            self._limits,
            num_prompt_tokens=len(token_ids),
            seed=seed,
            bad_words=self._bad_words(params.bad_words or ()),
        )
        if params.stop and self._tokenizer is None:
            raise InvalidRequestError(
                "stop strings need a tokenizer, but the engine runs without; use stop_token_ids",
                "stop",
            )
        return Request(request_id, token_ids, decoding, params.n, priority, cache_domain)

    def tokenize(self, prompt: str | Sequence[int]) -> list[int]:
        """Text with its special tokens, or token ids as they are."""
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise InvalidRequestError(
                    "the prompt is text, but the engine runs without a tokenizer; give"
                    ' {"prompt_token_ids": [...]}',
                    "prompt",
                )
            return self._tokenizer.encode(prompt)
        return list(prompt)

    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        if words and self._tokenizer is None:
            raise InvalidRequestError(
                "bad_words need a tokenizer, but the engine runs without; use logit_bias",
                "bad_words",
            )
        found: list[list[int]] = []
        for word in words:
            assert self._tokenizer is not None
            found.extend(list(ids) for ids in self._tokenizer.encode_bad_word(word))
        return found


def read_prompt(prompt: Any) -> str | list[int]:
    """One prompt of the offline API: text, {"prompt": text} or {"prompt_token_ids": [...]}."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if unknown:
            raise InvalidRequestError(
                f"a prompt has the unknown key {sorted(unknown)[0]!r}; known are 'prompt' and"
                " 'prompt_token_ids'",
                "prompt",
            )
        token_ids = prompt.get("prompt_token_ids")
        if isinstance(token_ids, Sequence) and not isinstance(token_ids, str):
            return list(token_ids)
        if token_ids is None and isinstance(prompt.get("prompt"), str):
            return str(prompt["prompt"])
    raise InvalidRequestError(
        f'a prompt is {prompt!r:.80}, but must be text or {{"prompt_token_ids": [...]}}', "prompt"
    )
