"""Bodies become chat calls beside the event loop where they are long."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from quire.server.generation.chat_call import ChatCall
from quire.server.generation.chat_prompt import chat_call_of, shown_tools
from quire.server.http.long_work import LONG_TEXT_CHARACTERS
from quire.text.parsers.tool_use import Tool, ToolMode, ToolUse

TEXT_ONLY: Any = SimpleNamespace(image_reader=None)
"""A service whose model takes no images."""


class Body:
    def __init__(self, *blocks: str, name: str = "text") -> None:
        self.messages = [{"content": [{name: block} for block in blocks]}]

    def to_chat_call(self, *, takes_images: bool = False) -> ChatCall:
        assert not takes_images
        self.thread = threading.current_thread()
        return ChatCall(messages=self.messages)


@pytest.mark.parametrize(
    ("blocks", "is_long"),
    [(["a"], False), (["a" * LONG_TEXT_CHARACTERS], True), ([""] * LONG_TEXT_CHARACTERS, True)],
)
def test_a_long_body_is_read_in_a_thread(blocks: list[str], is_long: bool) -> None:
    body = Body(*blocks)
    call = asyncio.run(chat_call_of(TEXT_ONLY, body))
    assert call.messages is body.messages
    assert (body.thread is not threading.current_thread()) == is_long


def test_long_names_make_a_body_long() -> None:
    body = Body("a", name="n" * LONG_TEXT_CHARACTERS)
    asyncio.run(chat_call_of(TEXT_ONLY, body))
    assert body.thread is not threading.current_thread()


def test_tools_that_may_not_be_called_are_shown_unless_the_server_hides_them() -> None:
    unused, used = (ToolUse((Tool("f"),), mode) for mode in (ToolMode.NONE, ToolMode.AUTO))
    for hides_unused, num_shown in ((False, 1), (True, 0)):
        assert len(shown_tools(unused, hides_unused=hides_unused)) == num_shown
        assert len(shown_tools(used, hides_unused=hides_unused)) == 1
