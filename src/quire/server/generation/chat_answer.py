"""The answer to a chat call: an assistant's message, of text, reasoning and tool calls.

Each choice has its own parser, which splits the text into events. A subclass writes the events in
its API's form, either as a stream or as one message.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import ClassVar, TypeVar

from quire.core.request import FinishReason
from quire.engine_client.results import Delta
from quire.server.generation.answer import Answer, AnsweredCall
from quire.server.generation.call_body import ChatBody
from quire.server.generation.chat_prompt import ChatPrompt, chat_call_of, chat_prompt
from quire.server.generation.collected_message import CollectedMessage
from quire.server.generation.http_generation import Prompts
from quire.server.generation.prediction_counts import PredictionCounts
from quire.server.service import Service
from quire.text.parsers.dialect import MessageParser
from quire.text.parsers.message_events import (
    CallArguments,
    CallEnd,
    CallStart,
    MessageEvent,
    ReasoningPiece,
)
from quire.text.tokenizer import Tokenizer

ChatBodyT = TypeVar("ChatBodyT", bound=ChatBody)

_UNNOTED = (str, CallArguments)

TOOL_CALLS = "tool_calls"
"""Finish reason of a choice that calls tools and waits for their results."""


class ChatAnswer(Answer[ChatBodyT]):
    """An answer whose choices are messages."""

    operation = "chat"
    #: Prefix of the ids of tool calls.
    call_id_prefix: ClassVar[str] = "call_"

    @classmethod
    async def prompts(cls, service: Service, body: ChatBodyT) -> Prompts:
        return await chat_prompt(service, await chat_call_of(service, body))

    def __init__(self, call: AnsweredCall[ChatBodyT]) -> None:
        super().__init__(call)
        assert isinstance(call.prompts, ChatPrompt), "made by `prompts` above"
        self._tool_use = call.prompts.tool_use
        self._new_parser = call.prompts.new_parser
        prediction = call.prompts.prediction_token_ids
        #: None without a prediction.
        self._predicted = PredictionCounts(prediction) if prediction else None
        #: Maps the index of each choice that has output to its reader.
        self._readers: dict[int, _ChoiceReader] = {}

    @abstractmethod
    def _message_events(
        self, choice: int, events: Sequence[MessageEvent], delta: Delta
    ) -> Iterable[bytes]:
        """The API's stream events for new output of a choice.

        `events` are the parsed events of the delta's text and may be empty. Each CallStart has a
        call id. `delta.finish_reason` is None until the choice has ended.
        """

    @abstractmethod
    def _whole_message(
        self, choice: int, message: CollectedMessage, delta: Delta
    ) -> Iterable[bytes]:
        """The JSON of a finished choice, in parts."""

    def _events(self, choice: int, delta: Delta) -> Iterable[bytes]:
        events = self._message_events(choice, self._read(choice, delta), delta)
        return self._with_prediction(choice, delta, events)

    def _whole_choice(self, choice: int, delta: Delta) -> Iterable[bytes]:
        message = CollectedMessage()
        for event in self._read(choice, delta):
            message.push(event)
        return self._with_prediction(choice, delta, self._whole_message(choice, message, delta))

    def _with_prediction(
        self, choice: int, delta: Delta, pieces: Iterable[bytes]
    ) -> Iterable[bytes]:
        """The pieces of new output. Taking the first piece counts the output's predicted tokens."""
        if self._predicted is None:
            return pieces
        return chain(self._predicted.follow(choice, delta), pieces)

    def _read(self, choice: int, delta: Delta) -> Sequence[MessageEvent]:
        self._num_generated += len(delta.token_ids)
        reader = self._readers.get(choice)
        if reader is None:
            at, branch = divmod(choice, self._generation.params.n)
            token_ids = self._results[at].outputs[branch].token_ids
            reader = _ChoiceReader(
                self._new_parser(), self._service.tokenizer, token_ids, self._new_call_id
            )
            self._readers[choice] = reader
        return reader.read(delta)

    def _new_call_id(self) -> str:
        """A new id of a tool call, in the form that the model's template needs, or the API's."""
        drawn = self._service.dialect.new_call_id()
        prefix, mark, rest = drawn.partition("_")
        return f"{self.call_id_prefix}{rest}" if (prefix, mark) == ("call", "_") else drawn

    def _has_calls(self, choice: int) -> bool:
        """Whether the choice has a complete tool call so far."""
        return choice in self._readers and self._readers[choice].has_calls

    def _finish_reason(self, choice: int, delta: Delta) -> str | None:
        """OpenAI's finish reason: "tool_calls" if a choice with tool calls has ended by itself."""
        if delta.finish_reason == FinishReason.STOP.value and self._has_calls(choice):
            return TOOL_CALLS
        return delta.finish_reason

    @property
    def _num_reasoning_tokens(self) -> int:
        """The reasoning tokens of all choices so far."""
        return sum(reader.num_reasoning_tokens for reader in self._readers.values())


class _ChoiceReader:
    """Parses the text of one choice and counts its reasoning tokens.

    The parser holds text back and deltas may end anywhere, so reasoning tokens are counted by
    bytes: the number of first tokens whose bytes cover the reasoning.

    Invariant: the first num_reasoning_tokens tokens have _num_counted_bytes bytes. With one token
    less, they would be shorter than the reasoning.
    """

    def __init__(
        self,
        parser: MessageParser,
        tokenizer: Tokenizer,
        token_ids: Sequence[int],
        new_call_id: Callable[[], str],
    ) -> None:
        """`token_ids` are the choice's tokens; the list grows while the reader is in use."""
        #: Whether the choice has a complete tool call so far.
        self.has_calls = False
        self.num_reasoning_tokens = 0
        self._parser = parser
        self._tokenizer = tokenizer
        self._token_ids = token_ids
        self._new_call_id = new_call_id
        self._num_reasoning_bytes = 0
        self._num_counted_bytes = 0

    def read(self, delta: Delta) -> Sequence[MessageEvent]:
        """The events of a delta. For the last delta, these include the text that was held back."""
        events = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            events = [*events, *self._parser.finish()]
        for at, event in enumerate(events):
            if type(event) not in _UNNOTED:  # a fast path for text, the usual event
                events[at] = self._noted(event)
        return events

    def _noted(self, event: MessageEvent) -> MessageEvent:
        if isinstance(event, ReasoningPiece):
            self._num_reasoning_bytes += len(event.text.encode())
            self._count_reasoning()
        elif isinstance(event, CallEnd):
            self.has_calls = True
        elif isinstance(event, CallStart) and event.call_id is None:
            return replace(event, call_id=self._new_call_id())
        return event

    def _count_reasoning(self) -> None:
        while (
            self._num_counted_bytes < self._num_reasoning_bytes
            and self.num_reasoning_tokens < len(self._token_ids)
        ):
            token_id = self._token_ids[self.num_reasoning_tokens]
            self._num_counted_bytes += len(self._tokenizer.token_bytes(token_id))
            self.num_reasoning_tokens += 1
