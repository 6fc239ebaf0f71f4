"""Anthropic's messages become those of a chat call, turn by turn."""

import pytest

from quire.errors import InvalidRequestError
from quire.server.routes.anthropic.blocks import chat_messages, system_texts
from quire.text.tool_messages import MAX_CALL_VALUES

BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=0a1b2;"


def user(*blocks):
    return {"role": "user", "content": [*blocks]}


def assistant(*blocks):
    return {"role": "assistant", "content": [*blocks]}


def text(words, **more):
    return {"type": "text", "text": words} | more


def use(call_id, name="read", **arguments):
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def result(call_id, content=None, **more):
    return {"type": "tool_result", "tool_use_id": call_id, "content": content} | more


def called(call_id, arguments, name="read"):
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def test_texts_and_blocks_of_text_are_one():
    plain = [{"role": "user", "content": "Hello"}]
    assert chat_messages(None, plain) == chat_messages(None, [user(text("Hello"))]) == plain
    hinted = user(text("Hello", cache_control={"type": "ephemeral"}, citations=None))
    assert chat_messages(None, [hinted]) == plain


def test_several_texts_are_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat_messages(None, [user(text("a"), text(""), text("b"))]) == [
        {"role": "user", "content": parts}
    ]
    assert chat_messages([text("a"), text("b")], [user(text("c"))])[0] == {
        "role": "system",
        "content": parts,
    }


def test_consecutive_messages_of_one_role_are_one_turn():
    messages = [user(text("a")), {"role": "user", "content": "b"}, assistant(text("c"))]
    messages += [assistant(text("d")), user(text("e"))]
    assert chat_messages("rules", messages) == [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": [text("a"), text("b")]},
        {"role": "assistant", "content": "c\nd"},
        {"role": "user", "content": "e"},
    ]


def test_calls_and_their_results():
    messages = [
        user(text("Read both.")),
        assistant(
            {"type": "thinking", "thinking": "Two files.", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            text("I read them."),
            use("toolu_1", path="é"),
            use("toolu_2", "list"),
        ),
        user(
            text("Be quick."),
            result("toolu_2", [text("a"), text("b")], is_error=True),
            result("toolu_1"),
        ),
    ]
    assert chat_messages(None, messages) == [
        {"role": "user", "content": "Read both."},
        {
            "role": "assistant",
            "content": "I read them.",
            "reasoning_content": "Two files.",
            "tool_calls": [
                called("toolu_1", '{"path": "é"}'),
                called("toolu_2", "{}", "list"),
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_2", "name": "list", "content": "Error: a\nb"},
        {"role": "tool", "tool_call_id": "toolu_1", "name": "read", "content": ""},
        {"role": "user", "content": "Be quick."},
    ]


def test_calls_without_a_text_have_no_content():
    (_, message, _) = chat_messages(
        None, [user(text("a")), assistant(use("toolu_1")), user(result("toolu_1", "b"))]
    )
    assert message["content"] is None
    empty = chat_messages(None, [user(text("a")), assistant(), user(text("b"))])[1]
    assert empty == {"role": "assistant", "content": ""}  # an answer that ended at once comes back


def test_a_tool_that_was_found_is_named_in_the_result():
    messages = [user(text("a")), assistant(use("toolu_1", "search"))]
    messages += [user(result("toolu_1", [{"type": "tool_reference", "tool_name": "read"}]))]
    assert chat_messages(None, messages)[-1]["content"] == "read"


def test_system_messages_are_of_the_rules_or_of_the_user():
    messages = [{"role": "system", "content": "b"}, user(text("c"))]
    messages += [{"role": "system", "content": [text("d")]}, assistant(use("toolu_1"))]
    messages += [{"role": "system", "content": "e"}, user(result("toolu_1", "f"))]
    found = chat_messages("a", messages)
    assert [message["role"] for message in found] == ["system", "user", "assistant", "tool", "user"]
    assert found[0]["content"] == [text("a"), text("b")]
    assert found[1]["content"] == [text("c"), text("d")]
    assert found[4]["content"] == "e"


@pytest.mark.parametrize(
    ("system", "texts"),
    [
        (None, []),
        ("You code.", ["You code."]),
        (f"{BILLING}\nYou code.", ["You code."]),
        ([text(BILLING), text("You code.")], ["", "You code."]),
        ([text(f"{BILLING}\n{BILLING}\n"), text(f"{BILLING}\nYou code.")], ["", "You code."]),
        ([text("You code."), text(BILLING)], ["You code.", BILLING]),
        (f"Say {BILLING}", [f"Say {BILLING}"]),
        ("x-anthropic is a prefix", ["x-anthropic is a prefix"]),
        ("x-anthropic-a:\n" * 64 + "you", ["you"]),
        ("x-anthropic-a:\n" * 200_064, ["x-anthropic-a:\n" * 200_000]),
    ],
)
def test_lines_that_change_at_every_call_are_left_out(system, texts):
    assert system_texts(system) == texts


def test_nothing_but_such_a_line_is_no_system_prompt():
    assert chat_messages([text(BILLING)], [user(text("a"))])[0]["role"] == "user"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("Hello", "messages is 'Hello', but must be a list"),
        ([], "there must be at least one message"),
        (["a"], "messages.0 is 'a'"),
        ([{"role": "tool", "content": "a"}], "messages.0.role is 'tool'"),
        ([{"role": "user"}], "messages.0.content is None"),
        ([{"role": "user", "content": ""}], "messages.0.content is empty"),
        ([user()], "messages.0.content is empty"),
        ([user("a")], "messages.0.content.0 is 'a'"),
        ([user({"type": "text"})], "messages.0.content.0.text is None"),
        ([user({"type": "image", "source": {}})], "content.0 is of the type image, which is not"),
        ([user({"type": "document"})], "is of the type document"),
        ([assistant({"type": "web_search_tool_result"})], "the type web_search_tool_result"),
        ([user(use("toolu_1"))], "has the type 'tool_use', but in user it must be text or"),
        ([assistant(result("toolu_1"))], "has the type 'tool_result', but in assistant"),
        ([user(result("toolu_1"))], "has the tool_use_id 'toolu_1', but the message before it"),
        ([assistant(use("toolu_1"))], "its tool_result must follow"),
        ([assistant(use("toolu_1")), user(text("a"))], "the next message has no tool_result"),
        ([assistant({"type": "tool_use", "id": "a", "name": "b"})], "its tool_result must follow"),
        (
            [assistant({"type": "tool_use", "id": "a", "name": "b"}), user(result("a"))],
            "messages.0.content.0.input is None, but must be an object",
        ),
        ([assistant(use("a")), user(result("a", 5))], "content.0.content is 5"),
        ([assistant(use("a")), user(result("a", [{"type": "mcp_tool_use"}]))], "type mcp_tool_use"),
        ([assistant(use("a")), user(result("a", [5]))], "content.0.content.0 is 5"),
    ],
)
def test_unreadable_blocks_are_named_with_their_place(messages, words):
    with pytest.raises(InvalidRequestError) as caught:
        chat_messages(None, messages)
    assert words in str(caught.value)
    assert caught.value.param == "messages"


def test_a_wrong_system_prompt_is_named():
    for system, words in ((5, "system is 5"), ([{"type": "image"}], "system.0 is of the type")):
        with pytest.raises(InvalidRequestError, match=words) as caught:
            chat_messages(system, [user(text("a"))])
        assert caught.value.param == "system"


def test_the_input_of_a_call_has_a_bound():
    many = {"a": [1] * MAX_CALL_VALUES}
    with pytest.raises(InvalidRequestError, match=r"messages.1.content.0 has an input with more"):
        chat_messages(None, [user(text("a")), assistant(use("t", **many)), user(result("t"))])


@pytest.mark.parametrize("kind", ["image", "document"])
def test_an_image_in_a_result_leaves_a_line(kind):
    """A tool that takes a screenshot does not end the session."""
    left_out = {}
    shot = result("a", [text("done"), {"type": kind, "source": {"type": "base64", "data": "aGk="}}])
    found = chat_messages(None, [user(text("x")), assistant(use("a")), user(shot)], left_out)
    assert found[-1]["content"] == f"done\n[{kind} left out: only text can be read]"
    assert list(left_out) == [f"messages.content.content ({kind})"]


def test_an_assistant_may_have_said_nothing():
    messages = [user(text("a")), {"role": "assistant", "content": None}, user(text("b"))]
    assert chat_messages(None, messages)[1] == {"role": "assistant", "content": ""}
