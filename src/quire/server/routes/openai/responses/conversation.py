"""Finds the stored conversation that a Responses call continues, and stores the call's answer.

Called by the routes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest

from quire.errors import InvalidRequestError
from quire.server.generation.answer_store import AnswerStore, Owner, StoredAnswer, StoredItems
from quire.server.generation.http_generation import digest_of, tenant_of, unchecked_keys
from quire.server.routes.openai.responses.input_items import kind_of
from quire.server.routes.openai.responses.response_object import ResponseObject
from quire.server.routes.openai.responses.response_writer import new_item_id
from quire.server.served_models import models_of

HOW_TO_STORE = (
    "this server stores no responses; send the whole conversation as input, or start it with"
    " --response-store-bytes"
)

_ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}

_KEPT = {
    "message": ("role", "content"),
    "reasoning": ("content", "summary"),
    "function_call": ("call_id", "name", "namespace", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "namespace", "input"),
    "custom_tool_call_output": ("call_id", "output"),
}
"""Fields of an item that are stored besides its id, type and status, since `input_items` reads
them. Other fields that a client sends are dropped to save memory."""

_KEPT_OF_PARTS = ("type", "text", "refusal", "image_url", "detail")


def answer_owner(http: HTTPRequest) -> Owner:
    """The owner of the answers that a call stores. Only calls of this owner find them."""
    unchecked = unchecked_keys(http)
    return Owner(tenant_of(http).name, digest_of(*unchecked) if any(unchecked) else "")


@dataclass(frozen=True, slots=True)
class Conversation:
    """The conversation that a call continues."""

    store: AnswerStore = field(default_factory=AnswerStore)
    owner: Owner = field(default_factory=lambda: Owner(""))
    #: Items that precede the call's input.
    history: Sequence[Any] = ()
    #: Id of the response that the history ends with; None for a new conversation.
    previous_id: str | None = None

    @classmethod
    async def of(cls, http: HTTPRequest, previous_id: str | None) -> "Conversation":
        """The conversation up to a response. Raises InvalidRequestError if any response in it is
        not stored."""
        shared = models_of(http).shared
        store, owner = shared.answers, answer_owner(http)
        if previous_id is None:
            return cls(store, owner)
        history = await shared.work.run(store.history(owner, previous_id))
        if history is None:
            reason = (
                f"the response {previous_id!r:.80}, or one before it, is not stored here, or no"
                " longer; send the whole conversation as input"
            )
            raise InvalidRequestError(
                reason if store.is_on else f"previous_response_id is set, but {HOW_TO_STORE}",
                "previous_response_id",
            )
        return cls(store, owner, history, previous_id)

    def resolved(self, items: Iterable[Any]) -> list[Any]:
        """The items, with references replaced by the stored items. Raises InvalidRequestError for
        two references to one item: many short references could expand to a huge input."""
        items = list(items)
        references = [item_id for item in items if (item_id := _reference(item)) is not None]
        if len(set(references)) < len(references):
            raise InvalidRequestError(
                "input refers to the same item twice; refer to each item once", "input"
            )
        stored = self.store.items_by_id(self.owner, references) if references else {}
        return [
            item if (at := _reference(item)) is None else stored.get(at, item) for item in items
        ]

    def listed(self, given: Iterable[Any]) -> StoredItems:
        """The items of a checked and resolved input, in their stored form.

        There may be many, so this is called in the thread that reads the body, not in the event
        loop. If the server stores no answers, returns no items.
        """
        if not self.store.is_on:
            return StoredItems()
        items = [_listed(item) for item in given]
        return StoredItems(msgspec.json.encode(items), tuple(item["id"] for item in items))

    def store_answer(self, response: ResponseObject, given: StoredItems) -> None:
        """Store an answer. `given` is the result of `listed` for the call's input."""
        output = response.output
        made = StoredItems(msgspec.json.encode(output), tuple(item.id for item in output))
        answer = msgspec.json.encode(response)
        self.store.store(
            self.owner, StoredAnswer(response.id, answer, given, made, self.previous_id)
        )


def _reference(item: Any) -> str | None:
    """The id that an item refers to; None if the item is no reference."""
    if not isinstance(item, dict) or kind_of(item) != "item_reference":
        return None
    item_id = item.get("id")
    return item_id if isinstance(item_id, str) else None


def _listed(item: dict[str, Any]) -> dict[str, Any]:
    """An item of the input as `input_items` lists it: with a type, an id, a list of parts."""
    kind = kind_of(item)
    item_id = item.get("id") or new_item_id(_ID_PREFIXES[kind])
    listed: dict[str, Any] = {"type": kind, "id": item_id, "status": _status(item)}
    listed |= {name: _kept(item[name]) for name in _KEPT[kind] if name in item}
    if kind == "message" and isinstance(item["content"], str):
        part: dict[str, Any] = {"type": "input_text", "text": item["content"]}
        if item["role"] == "assistant":
            part = {"type": "output_text", "text": item["content"], "annotations": []}
        listed["content"] = [part]
    return listed


def _status(item: dict[str, Any]) -> str:
    status = item.get("status")
    return status if status in ("in_progress", "incomplete") else "completed"


def _kept(value: Any) -> Any:
    """A field's value as it is stored. The parts in a list keep only known fields; other values are
    unchanged."""
    if not isinstance(value, list):
        return value
    return [
        {name: each for name, each in part.items() if name in _KEPT_OF_PARTS}
        if isinstance(part, dict)
        else part
        for part in value
    ]
