"""Writes log-probabilities in the two forms of OpenAI's API: of completions and of chats.

Called by `completions`, `chat` and `responses`.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any

import msgspec

from quire.core.step import TokenLogprobs
from quire.engine_client.logprob_entries import LogprobEntries
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.tokenizer import Tokenizer

_encode_json = msgspec.json.Encoder().encode

LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON can't express; OpenAI uses the same value."""


PromptLogprobs = list[dict[str, Any] | None]
"""For each prompt token, a dict of log-probabilities by token id; None for the first token."""


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists with one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    #: Position in the choice's text at which the token's text begins.
    text_offset: list[int]


class TopLogprob(msgspec.Struct):
    """One of the likeliest tokens."""

    token: str
    logprob: float
    #: The UTF-8 bytes that the token adds to the text.
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    """The log-probabilities at one position: of the chosen token and of the likeliest tokens."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """The log-probabilities of a choice's tokens."""

    content: list[ChatTokenLogprob]
    refusal: None = None


TokenNamer = Callable[[int], str]
"""A function that returns a token's name in the answer."""


def id_name(token_id: int) -> str:
    """The token's name in vLLM's form for `return_tokens_as_token_ids`."""
    return f"token_id:{token_id}"


class CompletionLogprobsWriter:
    """Writes the logprobs of one choice of a completion, piece by piece.

    Invariant: the next token's text begins at character `_offset` of the choice's text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        num_top: int,
        skip_special_tokens: bool,
        name: "TokenNamer",
    ) -> None:
        """`prompt_token_ids` precede the generated tokens. A `num_top` of -1 means the whole
        vocabulary."""
        self._name = name
        self._num_top = None if num_top == -1 else num_top
        self._tokenizer = tokenizer
        self._skips_special_tokens = skip_special_tokens
        self._offset = 0
        #: The caller's text while the tokens of an echoed text are written; None otherwise.
        self._echoed: str | None = None
        self._detokenizer = self._detokenizer_behind(prompt_token_ids)

    def write_echo(
        self, token_ids: Sequence[int], entries: LogprobEntries, text: str, *, is_given: bool
    ) -> Iterator[CompletionLogprobs]:
        """The logprobs of an echoed prompt, whose first token has no probability.

        `entries` are the logprobs of the other tokens; `text` is the echoed text. With `is_given`,
        `text` is the caller's prompt, which lacks special tokens that the tokenizer added;
        otherwise it was decoded from the tokens.
        """
        behind, self._detokenizer = self._detokenizer, self._detokenizer_behind(())
        self._echoed = text if is_given else None
        first = CompletionLogprobs([], [], [], [])
        self._write(first, token_ids[0], None, None)
        yield first
        for chunk in entries.chunks():
            yield self.write(chunk)
        self._offset, self._echoed, self._detokenizer = len(text), None, behind

    def write(
        self, entries: Iterable[TokenLogprobs], *, are_listed: bool = False
    ) -> CompletionLogprobs:
        """The logprobs of the next tokens, echoed or generated. With `are_listed`, the entries
        contain the tokens in the request's list instead of the likeliest tokens."""
        num_top = None if are_listed else self._num_top
        written = CompletionLogprobs([], [], [], [])
        for entry in entries:
            likeliest = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
            # The token itself comes first, as clients of vLLM expect.
            top = {entry.token_id: entry.logprob} | dict(islice(likeliest, num_top))
            self._write(written, entry.token_id, entry.logprob, top)
        return written

    def _write(
        self,
        written: CompletionLogprobs,
        token_id: int,
        logprob: float | None,
        top: Mapping[int, float] | None,
    ) -> None:
        written.tokens.append(self._name(token_id))
        written.token_logprobs.append(None if logprob is None else max(logprob, LEAST_LOGPROB))
        written.top_logprobs.append(None if top is None else self._named(top))
        written.text_offset.append(self._offset)
        self._offset += self._num_characters(token_id)

    def _num_characters(self, token_id: int) -> int:
        if self._echoed is None or token_id not in self._tokenizer.special_token_ids:
            return len(self._detokenizer.append(token_id))
        text = self._tokenizer.token_text(token_id)
        return len(text) if self._echoed.startswith(text, self._offset) else 0

    def _detokenizer_behind(self, token_ids: Sequence[int]) -> IncrementalDetokenizer:
        skips = self._skips_special_tokens
        return IncrementalDetokenizer(self._tokenizer, token_ids, skip_special_tokens=skips)

    def _named(self, top: Mapping[int, float]) -> dict[str, float]:
        named: dict[str, float] = {}
        for token_id, logprob in top.items():  # of two tokens with one name, keep the likelier
            name = self._name(token_id)
            named[name] = max(logprob, named.get(name, LEAST_LOGPROB))
        return named


def completion_logprobs_json(parts: Iterable[CompletionLogprobs]) -> Generator[bytes, None, None]:
    """The JSON of one CompletionLogprobs that joins `parts`, in pieces; may pause at each yield."""
    names = CompletionLogprobs.__struct_fields__
    lists: list[list[bytes]] = [[] for _ in names]
    for part in parts:
        for name, pieces in zip(names, lists, strict=True):
            pieces.append(_items_json(getattr(part, name)))
        yield b""
    opening = b"{"
    for name, pieces in zip(names, lists, strict=True):
        yield opening + _encode_json(name) + b":[" + b",".join(pieces) + b"]"
        opening = b","
    yield b"}"


def prompt_logprobs_json(
    tokenizer: Tokenizer, entries: LogprobEntries, num_top: int
) -> Generator[bytes, None, None]:
    """A JSON list, in pieces, with the logprobs of each prompt token; may pause at each yield.

    Each entry has the likeliest tokens and the token itself by token id; the first entry is null. A
    `num_top` of -1 means the whole vocabulary.
    """
    most = None if num_top == -1 else num_top
    yield b"[null"
    for chunk in entries.chunks():
        yield b"," + _items_json([_by_token_id(tokenizer, entry, most) for entry in chunk])
    yield b"]"


def _by_token_id(
    tokenizer: Tokenizer, entry: TokenLogprobs, num_top: int | None
) -> dict[str, dict[str, Any]]:
    ranked = zip(entry.top_token_ids, entry.top_logprobs, count(1), strict=False)
    top = {token_id: (logprob, rank) for token_id, logprob, rank in islice(ranked, num_top)}
    if entry.token_id not in top:
        own = dict(zip(entry.top_token_ids, count(1), strict=False))
        top[entry.token_id] = (entry.logprob, own.get(entry.token_id, entry.rank))
    return {
        str(token_id): {
            "logprob": max(logprob, LEAST_LOGPROB),
            "rank": rank,
            "decoded_token": tokenizer.token_text(token_id),
        }
        for token_id, (logprob, rank) in top.items()
    }


def chat_logprobs(
    tokenizer: Tokenizer,
    entries: Iterable[TokenLogprobs],
    name: TokenNamer | None = None,
    *,
    are_listed: bool = False,
) -> ChatLogprobs:
    """The logprobs of generated tokens, each with the likeliest tokens that the request asked for.

    `name` names tokens; None uses their texts. With `are_listed`, the entries contain the tokens in
    the request's list instead of the likeliest tokens, and the token itself is added.
    """
    name = name or tokenizer.token_text
    return ChatLogprobs([_chat_entry(tokenizer, entry, name, are_listed) for entry in entries])


def chat_logprobs_json(
    tokenizer: Tokenizer,
    entries: LogprobEntries,
    name: TokenNamer | None = None,
    *,
    are_listed: bool = False,
) -> Generator[bytes, None, None]:
    """The JSON of `chat_logprobs` in pieces; may pause at each yield."""
    head, tail = _encode_json(ChatLogprobs([])).split(b"[]")
    opening = head + b"["
    for items in token_logprobs_json(tokenizer, entries, name, are_listed=are_listed):
        yield opening + items
        opening = b","
    yield (b"]" if entries else opening + b"]") + tail


def token_logprobs_json(
    tokenizer: Tokenizer,
    entries: LogprobEntries,
    name: TokenNamer | None = None,
    *,
    are_listed: bool = False,
) -> Generator[bytes, None, None]:
    """The JSON of each token's ChatTokenLogprob, separated by commas, several per yield."""
    for chunk in entries.chunks():
        yield _items_json(chat_logprobs(tokenizer, chunk, name, are_listed=are_listed).content)


def last_entries(
    tokenizer: Tokenizer, entries: Iterable[TokenLogprobs], text: str
) -> list[TokenLogprobs]:
    """The last entries whose tokens together make up `text`. Special tokens count as empty
    text."""
    num_bytes, found = len(text.encode()), []
    for entry in reversed(list(entries)):
        if num_bytes <= 0:
            break
        found.append(entry)
        if entry.token_id not in tokenizer.special_token_ids:
            num_bytes -= len(tokenizer.token_bytes(entry.token_id))
    return found[::-1]


def _items_json(items: list[Any]) -> bytes:
    """The JSON of a list without its brackets."""
    return _encode_json(items)[1:-1]


def _chat_entry(
    tokenizer: Tokenizer, entry: TokenLogprobs, name: TokenNamer, are_listed: bool
) -> ChatTokenLogprob:
    own = {entry.token_id: entry.logprob} if are_listed else {}
    top = [
        TopLogprob(
            name(token_id),
            max(logprob, LEAST_LOGPROB),
            list(tokenizer.token_bytes(token_id)),
        )
        for token_id, logprob in (
            own | dict(zip(entry.top_token_ids, entry.top_logprobs, strict=True))
        ).items()
    ]
    return ChatTokenLogprob(
        name(entry.token_id),
        max(entry.logprob, LEAST_LOGPROB),
        list(tokenizer.token_bytes(entry.token_id)),
        top,
    )


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's text, or its bytes in OpenAI's notation if they are not complete characters."""
    share = tokenizer.token_bytes(token_id)
    try:
        return share.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in share)
