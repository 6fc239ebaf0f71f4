"""Turns the parsed events of a model's text into output items and their stream events.

One item is open at a time; an event of another kind ends the item. Called by `responses`, for
streamed and unstreamed answers.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any

import msgspec

from quire.server.routes.openai.responses.response_object import (
    CustomCall,
    FunctionCall,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from quire.server.routes.openai.responses.stream_events import (
    ArgumentsDelta,
    ArgumentsDone,
    InputDelta,
    InputDone,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    StreamEvent,
    TextDelta,
    TextDone,
)
from quire.server.routes.openai.responses.text_argument import TextArgument
from quire.server.routes.openai.responses.tool_definitions import ToolName, ToolNames
from quire.text.parsers.message_events import (
    CallArguments,
    CallEnd,
    CallStart,
    MessageEvent,
)


def new_item_id(prefix: str) -> str:
    """An id that no other item has."""
    return f"{prefix}_{secrets.token_hex(16)}"


class _OpenItem(ABC):
    """An item that is still growing."""

    #: Prefix of the ids of items of this kind, as in OpenAI's API.
    id_prefix: str

    def __init__(self, item_id: str, output_index: int) -> None:
        self.item_id = item_id
        self.at = output_index
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)

    @abstractmethod
    def item(self, status: ItemStatus) -> OutputItem:
        """The item with this status. With the status "in_progress", it has no content yet."""

    def begin(self) -> Iterator[StreamEvent]:
        yield ItemAdded(output_index=self.at, item=self.item("in_progress"))

    @abstractmethod
    def add(self, piece: str, logprobs: bytes) -> Iterator[StreamEvent]:
        """Add a piece. `logprobs` is the JSON of the piece's tokens, without brackets."""

    @abstractmethod
    def end(self, status: ItemStatus) -> Iterator[StreamEvent]:
        """The events that end the item's content. The caller adds the event that ends the item."""


class _OpenMessage(_OpenItem):
    id_prefix = "msg"

    def __init__(self, item_id: str, output_index: int) -> None:
        super().__init__(item_id, output_index)
        self._logprobs: list[bytes] = []

    def item(self, status: ItemStatus) -> OutputMessage:
        content = [] if status == "in_progress" else [self._part()]
        return OutputMessage(id=self.item_id, status=status, content=content)

    def begin(self) -> Iterator[StreamEvent]:
        yield from super().begin()
        yield PartAdded(item_id=self.item_id, output_index=self.at, part=OutputText(text=""))

    def add(self, piece: str, logprobs: bytes) -> Iterator[StreamEvent]:
        self.pieces.append(piece)
        if logprobs:
            self._logprobs.append(logprobs)
        yield TextDelta(
            item_id=self.item_id, output_index=self.at, delta=piece, logprobs=_json_list([logprobs])
        )

    def end(self, status: ItemStatus) -> Iterator[StreamEvent]:
        part = self._part()
        yield TextDone(
            item_id=self.item_id, output_index=self.at, text=part.text, logprobs=part.logprobs
        )
        yield PartDone(item_id=self.item_id, output_index=self.at, part=part)

    def _part(self) -> OutputText:
        return OutputText(text=self.text, logprobs=_json_list(self._logprobs))


class _OpenReasoning(_OpenItem):
    id_prefix = "rs"

    def item(self, status: ItemStatus) -> ReasoningItem:
        content = [] if status == "in_progress" else [ReasoningText(text=self.text)]
        return ReasoningItem(id=self.item_id, status=status, content=content)

    def begin(self) -> Iterator[StreamEvent]:
        yield from super().begin()
        yield PartAdded(item_id=self.item_id, output_index=self.at, part=ReasoningText(text=""))

    def add(self, piece: str, logprobs: bytes) -> Iterator[StreamEvent]:
        self.pieces.append(piece)
        yield ReasoningDelta(item_id=self.item_id, output_index=self.at, delta=piece)

    def end(self, status: ItemStatus) -> Iterator[StreamEvent]:
        text = self.text
        yield ReasoningDone(item_id=self.item_id, output_index=self.at, text=text)
        yield PartDone(item_id=self.item_id, output_index=self.at, part=ReasoningText(text=text))


class _OpenCall(_OpenItem):
    """A call of a function, under the client's name of the tool."""

    id_prefix = "fc"

    def __init__(self, item_id: str, output_index: int, call_id: str, name: ToolName) -> None:
        super().__init__(item_id, output_index)
        self._call_id = call_id
        self._name = name

    def item(self, status: ItemStatus) -> OutputItem:
        return FunctionCall(arguments=self.text, **self._fields(status))

    def add(self, piece: str, logprobs: bytes) -> Iterator[StreamEvent]:
        self.pieces.append(piece)
        yield ArgumentsDelta(item_id=self.item_id, output_index=self.at, delta=piece)

    def end(self, status: ItemStatus) -> Iterator[StreamEvent]:
        if status == "completed":
            yield ArgumentsDone(
                item_id=self.item_id,
                output_index=self.at,
                name=self._name.name,
                arguments=self.text,
            )

    def _fields(self, status: ItemStatus) -> dict[str, Any]:
        name = self._name
        namespace = msgspec.UNSET if name.namespace is None else name.namespace
        return {
            "id": self.item_id,
            "status": status,
            "call_id": self._call_id,
            "name": name.name,
            "namespace": namespace,
        }


class _OpenCustomCall(_OpenCall):
    id_prefix = "ctc"

    def __init__(self, item_id: str, output_index: int, call_id: str, name: ToolName) -> None:
        super().__init__(item_id, output_index, call_id, name)
        self._argument = TextArgument()

    def item(self, status: ItemStatus) -> OutputItem:
        return CustomCall(input=self.text, **self._fields(status))

    def add(self, piece: str, logprobs: bytes) -> Iterator[StreamEvent]:
        text = self._argument.push(piece)
        if text:
            self.pieces.append(text)
            yield InputDelta(item_id=self.item_id, output_index=self.at, delta=text)

    def end(self, status: ItemStatus) -> Iterator[StreamEvent]:
        if status == "completed":
            yield InputDone(item_id=self.item_id, output_index=self.at, input=self.text)


class ResponseWriter:
    """Writes the output of one response.

    Invariant: `items` are the ended items in order; the open item, if any, is not among them. Each
    event's sequence number is the number of events before the event.
    """

    def __init__(self, names: ToolNames, new_id: Callable[[str], str] = new_item_id) -> None:
        """`names` are the names of the tools that may be called. `new_id` makes an item's id with a
        given prefix."""
        self.items: list[OutputItem] = []
        self._names = names
        self._new_id = new_id
        self._open: _OpenItem | None = None
        self._numbers = count()

    def numbered(self, events: Iterable[StreamEvent]) -> Iterator[StreamEvent]:
        """Number these events, which must be the next in the stream."""
        for event in events:
            event.sequence_number = next(self._numbers)
            yield event

    def push(self, event: MessageEvent, logprobs: bytes = b"") -> Iterator[StreamEvent]:
        """The stream events for one more event of the message; must be iterated to the end.
        `logprobs` belong to a text's tokens and are a JSON list without brackets."""
        return self.numbered(self._push(event, logprobs))

    def finish(self, *, is_complete: bool) -> Iterator[StreamEvent]:
        """The stream events that end the output. `is_complete`: whether the model ended by itself.

        A complete answer has a message or a call, if necessary an empty message, since clients
        treat an answer without either as an unfinished turn.
        """
        return self.numbered(self._finish(is_complete))

    def _push(self, event: MessageEvent, logprobs: bytes) -> Iterator[StreamEvent]:
        if isinstance(event, CallEnd):
            if isinstance(self._open, _OpenCall):
                yield from self._close("completed")
            return
        if isinstance(event, CallStart):
            yield from self._begin_call(event)
            return
        if not isinstance(event, CallArguments):
            kind = _OpenMessage if isinstance(event, str) else _OpenReasoning
            if not isinstance(self._open, kind):
                yield from self._begin(kind)
        assert self._open is not None
        yield from self._open.add(event if isinstance(event, str) else event.text, logprobs)

    def _finish(self, is_complete: bool) -> Iterator[StreamEvent]:
        yield from self._interrupt("completed" if is_complete else "incomplete")
        if is_complete and all(isinstance(item, ReasoningItem) for item in self.items):
            yield from self._begin(_OpenMessage)
            yield from self._close("completed")

    def _begin(self, kind: type[_OpenMessage] | type[_OpenReasoning]) -> Iterator[StreamEvent]:
        yield from self._interrupt("completed")
        self._open = kind(self._new_id(kind.id_prefix), len(self.items))
        yield from self._open.begin()

    def _begin_call(self, event: CallStart) -> Iterator[StreamEvent]:
        yield from self._interrupt("completed")
        name = self._names.of(event.name)
        kind = _OpenCustomCall if name.is_custom else _OpenCall
        call_id = event.call_id or self._new_id("call")
        self._open = kind(self._new_id(kind.id_prefix), len(self.items), call_id, name)
        yield from self._open.begin()

    def _interrupt(self, status: ItemStatus) -> Iterator[StreamEvent]:
        """End the open item. A call that did not end by itself becomes incomplete."""
        yield from self._close("incomplete" if isinstance(self._open, _OpenCall) else status)

    def _close(self, status: ItemStatus) -> Iterator[StreamEvent]:
        if self._open is None:
            return
        ended, self._open = self._open, None
        yield from ended.end(status)
        self.items.append(ended.item(status))
        yield ItemDone(output_index=ended.at, item=self.items[-1])


def _json_list(parts: Iterable[bytes]) -> Any:
    """A JSON list made of `parts`, each of which is the JSON of one or more items."""
    joined = b",".join(part for part in parts if part)
    return msgspec.Raw(b"[" + joined + b"]") if joined else []
