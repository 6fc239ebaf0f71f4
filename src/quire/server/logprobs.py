"""Log-probabilities in the two shapes of OpenAI's API.

Knows no requests. Called by `completions` and `chat`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.core.step import TokenLogprobs
from quire.engine.outputs import Logprob
from quire.server.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    TopLogprob,
)
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has not; the value that OpenAI uses."""


class CompletionLogprobsWriter:
    """The logprobs of one choice of a completion, piece by piece.

    Invariant: the next token's text begins at character `_offset` of the choice's text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        num_top: int,
        skip_special_tokens: bool,
    ) -> None:
        """prompt_token_ids: what precedes the choice's text; empty where the prompt is echoed."""
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._offset = 0
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens
        )

    def echo(
        self,
        token_ids: Sequence[int],
        prompt_logprobs: Sequence[Mapping[int, Logprob] | None],
    ) -> CompletionLogprobs:
        """Of the prompt's tokens. The first has no probability: nothing comes before it."""
        written = CompletionLogprobs([], [], [], [])
        for token_id, found in zip(token_ids, prompt_logprobs, strict=True):
            if found is None:
                self._write(written, token_id, None, None)
                continue
            top = {
                token: entry.logprob
                for token, entry in found.items()
                if token == token_id or (entry.rank or 0) <= self._num_top
            }
            self._write(written, token_id, found[token_id].logprob, top)
        return written

    def write(self, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Of the next generated tokens."""
        written = CompletionLogprobs([], [], [], [])
        for entry in entries:
            likeliest = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
            top = dict(list(likeliest)[: self._num_top])
            top.setdefault(entry.token_id, entry.logprob)
            self._write(written, entry.token_id, entry.logprob, top)
        return written

    def _write(
        self,
        written: CompletionLogprobs,
        token_id: int,
        logprob: float | None,
        top: Mapping[int, float] | None,
    ) -> None:
        written.tokens.append(token_name(self._tokenizer, token_id))
        written.token_logprobs.append(None if logprob is None else max(logprob, LEAST_LOGPROB))
        written.top_logprobs.append(None if top is None else self._named(top))
        written.text_offset.append(self._offset)
        self._offset += len(self._detokenizer.append(token_id))

    def _named(self, top: Mapping[int, float]) -> dict[str, float]:
        named: dict[str, float] = {}
        for token_id, logprob in top.items():  # of two tokens that read alike, the likelier one
            named.setdefault(token_name(self._tokenizer, token_id), max(logprob, LEAST_LOGPROB))
        return named


def extend_logprobs(first: CompletionLogprobs, second: CompletionLogprobs) -> None:
    """Let `second` follow in `first`."""
    first.tokens += second.tokens
    first.token_logprobs += second.token_logprobs
    first.top_logprobs += second.top_logprobs
    first.text_offset += second.text_offset


def prompt_logprobs_json(
    token_ids: Sequence[int],
    prompt_logprobs: Sequence[Mapping[int, Logprob] | None],
    num_top: int,
) -> list[dict[str, Any] | None]:
    """For each prompt token, by token id: the likeliest ones and the token itself."""
    return [
        None if found is None else _by_token_id(token_id, found, num_top)
        for token_id, found in zip(token_ids, prompt_logprobs, strict=True)
    ]


def _by_token_id(
    token_id: int, found: Mapping[int, Logprob], num_top: int
) -> dict[str, dict[str, Any]]:
    return {
        str(token): {
            "logprob": max(entry.logprob, LEAST_LOGPROB),
            "rank": entry.rank,
            "decoded_token": entry.decoded_token,
        }
        for token, entry in found.items()
        if token == token_id or (entry.rank or 0) <= num_top
    }


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """Of generated tokens, each with as many likeliest ones as the request asked for."""
    return ChatLogprobs([_chat_entry(tokenizer, entry) for entry in entries])


def _chat_entry(tokenizer: Tokenizer, entry: TokenLogprobs) -> ChatTokenLogprob:
    top = [
        TopLogprob(
            tokenizer.token_text(token_id),
            max(logprob, LEAST_LOGPROB),
            list(tokenizer.token_bytes(token_id)),
        )
        for token_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
    ]
    return ChatTokenLogprob(
        tokenizer.token_text(entry.token_id),
        max(entry.logprob, LEAST_LOGPROB),
        list(tokenizer.token_bytes(entry.token_id)),
        top,
    )


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's text, or its bytes in OpenAI's notation where they are no whole characters."""
    share = tokenizer.token_bytes(token_id)
    try:
        return share.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in share)
