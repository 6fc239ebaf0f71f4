"""Formats of tool calls and reasoning, as fields of the data files that describe dialects.

A dialect is the format in which a family of models writes. Marks are texts such as `<tool_call>`
that begin and end the parts of a message. Plain data. Read by the parser and by the writers of
grammars, so that both use the same format.
"""

import msgspec


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Marks around the reasoning before an answer. Grammars write the first begin and end mark."""

    begin: tuple[str, ...]
    end: tuple[str, ...]
    #: Whether a call may begin inside the reasoning and thereby end it.
    is_ended_by_calls: bool = False


class AnswerMarks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Marks around the text of an answer, for models that write them."""

    begin: str
    end: str


class CallForm(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="syntax"
):
    """A format for calls: begin (call_begin CALL call_end separator)... end.

    Readers accept any white space between the words of a mark, and a missing end. Grammars write
    each mark literally.
    """

    #: The mark before one or several calls. If it is "" and call_begin is not, each call stands
    #: alone. If both are "", calls are the whole message, and are recognized by callable names.
    begin: str = ""
    end: str = ""
    call_begin: str = ""
    call_end: str = ""
    #: The text between calls within one pair of begin and end.
    separator: str = ""
    #: Whether several calls share one pair of begin and end.
    is_repeated: bool = False
    #: Whether a call of an unknown tool is treated as text.
    needs_known_name: bool = False
    #: The separators in JSON that grammars write: those that the chat template writes.
    item_separator: str = ", "
    key_separator: str = ": "
    #: Whether grammars write arguments in alphabetical order, as the model's template does.
    sorts_keys: bool = False

    @property
    def marker(self) -> str:
        """The mark that announces a call in text; "" if calls can only start the message."""
        return (self.begin or self.call_begin).strip()

    @property
    def first_characters(self) -> str:
        """The possible first characters of a call after its marker; "" if not { or [."""
        return ""


class JsonForm(CallForm, frozen=True, tag="json", kw_only=True):
    """A JSON object with the tool's name and arguments, or an array of such objects."""

    name_key: str = "name"
    #: Names of the member with the arguments; grammars write the first name.
    arguments_keys: tuple[str, ...] = ("arguments", "parameters")
    #: Whether grammars write an array.
    is_list: bool = False

    @property
    def first_characters(self) -> str:
        """A JSON object or array begins with one of these."""
        return "{["


class NamedForm(CallForm, frozen=True, tag="named", kw_only=True):
    """The tool's name, a mark, and the arguments as a JSON object."""

    name_end: str
    #: The text before the name, which readers don't require.
    name_prefix: str = ""
    #: The mark between the name and the call's id; "" if calls have no ids.
    id_begin: str = ""


class TaggedForm(CallForm, frozen=True, tag="tagged", kw_only=True):
    """The tool's name, and each argument between marks; strings are written unquoted."""

    name_end: str
    parameter_begin: str
    key_end: str
    parameter_end: str
    #: The text on both sides of a value that is not part of it: a line break, or "".
    value_space: str = ""
    #: Whether grammars write True and False.
    has_python_words: bool = False


class LooseForm(CallForm, frozen=True, tag="loose", kw_only=True):
    """The tool's name and a JSON-like object with bare keys, and `quote` around strings."""

    quote: str


class PythonForm(CallForm, frozen=True, tag="python", kw_only=True):
    """Calls of Python functions with literal keyword arguments, in a list or alone."""

    is_list: bool = False


class ChannelForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An answer in the harmony format: several messages, each `start role HEADER message BODY end`.

    A header is: channel NAME recipient constrain TYPE. The prompt contains the first message up to
    its role.
    """

    start: str
    role: str
    channel: str
    #: The mark before the name of a message's recipient.
    recipient: str
    constrain: str
    message: str
    #: The marks after a body: before another message, after a call, and after the answer.
    ends: tuple[str, str, str]
    #: The prefix of tool names as recipients.
    call_prefix: str
    reasoning_channel: str
    call_channel: str
    answer_channel: str


AnyCallForm = JsonForm | NamedForm | TaggedForm | LooseForm | PythonForm
