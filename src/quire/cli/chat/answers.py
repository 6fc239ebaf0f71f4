"""Answers to conversations: from an engine in this process, or from a server by OpenAI's API."""

import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from quire.cli.chat.terminal import Piece
from quire.core.sampling_params import SamplingDefaults, SamplingParams
from quire.errors import EngineDeadError, InvalidRequestError, QuireError, did_you_mean
from quire.text.chat_encoding import encode_chat
from quire.text.chat_template import ChatTemplate
from quire.text.parsers.message_events import MessageEvent, ReasoningPiece
from quire.text.parsers.model_dialect import model_dialect
from quire.text.parsers.tool_use import NO_TOOLS
from quire.text.tokenizer_config import tokenizer_fields

if TYPE_CHECKING:
    from quire.offline.llm import LLM

Message = dict[str, str]

CHAT_DEFAULTS: Mapping[str, float] = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}
"""Sampling options of a chat if the model names none. The API's defaults are OpenAI's instead."""

TIMEOUT_S = 600.0
"""Maximum seconds to wait for the next piece of a server's answer."""


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    """The tokens and times of an answer."""

    num_tokens: int
    #: Seconds until the first piece, and until the last one.
    first_s: float
    total_s: float

    def __str__(self) -> str:
        decode_s = self.total_s - self.first_s
        rate = (self.num_tokens - 1) / decode_s if self.num_tokens > 1 and decode_s > 0 else 0.0
        return (
            f"{self.num_tokens} tokens, {rate:.1f} tokens/s, first token after {self.first_s:.2f} s"
        )


class Answers(Protocol):
    """A model that answers a session."""

    #: The model's name.
    name: str
    #: The usage of the last answer that has ended; None before.
    usage: AnswerUsage | None

    def stream(self, messages: list[Message], params: SamplingParams) -> Iterator[Piece]:
        """Answer the conversation. Raises InvalidRequestError, EngineDeadError."""
        ...

    def with_defaults(self, params: SamplingParams) -> SamplingParams:
        """The params with CHAT_DEFAULTS, if neither the caller nor the model names any."""
        ...

    def switch(self, name: str) -> None:
        """Answer with another model from now on. Raises QuireError, and keeps the model, if it
        can't be had."""
        ...


class LoadedModel(NamedTuple):
    """A model in this process."""

    name: str
    llm: "LLM"
    #: The folder or GGUF file that has its chat template.
    text_folder: Path


class EngineAnswers:
    """Answers of an engine in this process."""

    def __init__(
        self, load: Callable[[str | None], LoadedModel], fetch: Callable[[str], object]
    ) -> None:
        """`load` loads a model by name, and the one that the command line names for None. `fetch`
        fetches a model that is not here, and raises QuireError if it can't be had or served."""
        self.usage: AnswerUsage | None = None
        self._load, self._fetch = load, fetch
        self._use(None)

    def _use(self, name: str | None) -> None:
        """Load a model, and answer with it."""
        self.name, self._llm, folder = self._load(name)
        self._loaded = name
        self._template = ChatTemplate.from_folder(folder)
        tokenizer = self._llm.get_tokenizer()
        found = model_dialect(self._template, tokenizer, tokenizer_fields(folder))
        self._dialect = found.dialect

    def switch(self, name: str) -> None:
        """See `Answers`. Only one model is in memory at a time."""
        self._fetch(name)
        before = self._loaded
        del self._llm  # frees its memory
        try:
            self._use(name)
        except QuireError:
            self._use(before)
            raise

    def stream(self, messages: list[Message], params: SamplingParams) -> Iterator[Piece]:
        """See `Answers`."""
        began_s, first_s = time.monotonic(), None
        before = self._num_generated()
        pieces = self._pieces(messages, params)
        try:
            for piece in pieces:
                first_s = first_s or time.monotonic() - began_s
                yield piece
        finally:
            pieces.close()
            total_s = time.monotonic() - began_s
            self.usage = AnswerUsage(self._num_generated() - before, first_s or total_s, total_s)

    def _pieces(
        self, messages: list[Message], params: SamplingParams
    ) -> Generator[Piece, None, None]:
        if not self._dialect.has_reasoning:
            for text in self._llm.stream_chat(messages, params):
                yield Piece(text)
            return
        # The marks of reasoning may be special tokens, which the parser needs to see.
        tokenizer = self._llm.get_tokenizer()
        if tokenizer.special_ids_of(self._dialect.tokens_kept_for(NO_TOOLS)):
            params = replace(params, skip_special_tokens=False)
        encoded = encode_chat(self._template, tokenizer, messages, finds_beginning=True)
        parser = self._dialect.parser(NO_TOOLS, encoded.beginning)
        texts = self._llm.stream({"prompt_token_ids": encoded.token_ids}, params)
        try:
            for text in texts:
                yield from _as_pieces(parser.push(text))
            yield from _as_pieces(parser.finish())
        finally:
            texts.close()

    def with_defaults(self, params: SamplingParams) -> SamplingParams:
        """See `Answers`."""
        names_none = self._llm.engine.limits.defaults == SamplingDefaults()
        return with_chat_defaults(params) if names_none else params

    def _num_generated(self) -> int:
        return self._llm.engine.stats().num_generated_tokens


def _as_pieces(events: Sequence[MessageEvent]) -> Iterator[Piece]:
    """The text and the reasoning among the events. A chat has no tools, so no event is a call."""
    for event in events:
        if isinstance(event, ReasoningPiece):
            yield Piece(event.text, is_reasoning=True)
        elif isinstance(event, str):
            yield Piece(event)


class ServerAnswers:
    """Answers of a server with OpenAI's chat API."""

    def __init__(self, url: str, name: str | None = None, api_key: str | None = None) -> None:
        """url: such as http://127.0.0.1:8000. name: the model's; None means the server's first
        model. Raises EngineDeadError if the server does not answer."""
        self.usage: AnswerUsage | None = None
        self._url = url.rstrip("/").removesuffix("/v1")
        self._api_key = api_key
        self.name = name or self._served()[0]

    def switch(self, name: str) -> None:
        """See `Answers`."""
        served = self._served()
        if name not in served:
            raise InvalidRequestError(
                f"the server at {self._url} does not serve {name!r:.80}"
                f"{did_you_mean(name, served)}; it serves {', '.join(served):.400}"
            )
        self.name = name

    def _served(self) -> list[str]:
        """The names of the server's models."""
        return [str(each["id"]) for each in self._ask("/v1/models")["data"]]

    def stream(self, messages: list[Message], params: SamplingParams) -> Iterator[Piece]:
        """See `Answers`."""
        began_s, first_s, num_tokens = time.monotonic(), None, 0
        body = {
            "model": self.name,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **_fields(params),
        }
        with self._open("/v1/chat/completions", body) as lines:
            for line in lines:
                text = line.decode().strip().removeprefix("data: ")
                if not text.startswith("{"):
                    continue
                event = json.loads(text)
                if "error" in event:
                    raise EngineDeadError(str(event["error"].get("message", event["error"])))
                num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
                for choice in event.get("choices", ()):
                    delta = choice.get("delta", {})
                    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
                    for piece in (Piece(reasoning or "", True), Piece(delta.get("content") or "")):
                        if piece.text:
                            first_s = first_s or time.monotonic() - began_s
                            yield piece
        total_s = time.monotonic() - began_s
        self.usage = AnswerUsage(num_tokens, first_s or total_s, total_s)

    def with_defaults(self, params: SamplingParams) -> SamplingParams:
        """See `Answers`. A server names its own defaults to nobody, so the caller's params are
        sent as they are."""
        return params

    def _ask(self, path: str) -> Any:
        with self._open(path, None) as answer:
            return json.load(answer)

    def _open(self, path: str, body: Mapping[str, Any] | None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        request = Request(f"{self._url}{path}", content, {"Content-Type": "application/json"})
        if self._api_key is not None:
            request.add_header("Authorization", f"Bearer {self._api_key}")
        try:
            return urlopen(request, timeout=TIMEOUT_S)
        except HTTPError as error:
            raise InvalidRequestError(_message_of(error.read(), error)) from error
        except (URLError, OSError) as error:
            raise EngineDeadError(f"no server answers at {self._url}: {error}") from error


def _message_of(content: bytes, error: HTTPError) -> str:
    """The message in an error's JSON, or the status."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answers {error.code} {error.reason}"


_NAMES = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens")


def _fields(params: SamplingParams) -> dict[str, Any]:
    """The params that were set, as fields of a call."""
    found = {name: getattr(params, name) for name in _NAMES}
    return {name: value for name, value in found.items() if value not in (None, [], ())}


def with_chat_defaults(params: SamplingParams) -> SamplingParams:
    """The params with CHAT_DEFAULTS for options that are None."""
    left_open: dict[str, Any] = {
        name: value for name, value in CHAT_DEFAULTS.items() if getattr(params, name) is None
    }
    return replace(params, **left_open)


def shown_params(params: SamplingParams) -> Sequence[str]:
    """A line for each option that was set."""
    return [f"{name} {value}" for name, value in _fields(params).items()]
