"""Data classes for the formats of tool calls and reasoning.

A dialect is the format in which a family of models writes, described by a data file with these
fields. Marks are texts such as `<tool_call>` that begin and end the parts of a message. The parsers
and the writers of grammars both use these classes.
"""

import msgspec


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Marks around the reasoning before an answer. Parsers accept all of them; grammars use the
    first `begin` and the first `end`."""

    begin: tuple[str, ...]
    end: tuple[str, ...]
    #: True if a call may begin inside the reasoning and thereby end it.
    is_ended_by_calls: bool = False


class AnswerMarks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Marks around the text of an answer. Most models write none."""

    begin: str
    end: str


class CallForm(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="syntax"
):
    """A format of calls: begin (call_begin CALL call_end separator)... end.

    Parsers accept any white space between the words of a mark, and a missing `end`. Grammars use
    each mark literally.
    """

    #: The mark before one or several calls. If it is "", call_begin alone marks each call. If both
    #: are "", calls fill the whole message, and are recognized by the names of callable tools.
    begin: str = ""
    end: str = ""
    call_begin: str = ""
    call_end: str = ""
    #: The text between calls within one pair of begin and end.
    separator: str = ""
    #: True if several calls share one pair of begin and end.
    is_repeated: bool = False
    #: True if a call of an unknown tool is treated as text.
    needs_known_name: bool = False
    #: The separators in JSON that grammars use, equal to those in the chat template's output.
    item_separator: str = ", "
    key_separator: str = ": "
    #: True if grammars order arguments alphabetically, as the chat template does.
    sorts_keys: bool = False

    @property
    def marker(self) -> str:
        """The mark that begins a call in text; "" if calls have no mark and so must stand at the
        start of the message."""
        return (self.begin or self.call_begin).strip()

    @property
    def first_characters(self) -> str:
        """The brackets ({ or [ or both) with which a call can begin after its marker; "" if calls
        begin with other characters."""
        return ""


class JsonForm(CallForm, frozen=True, tag="json", kw_only=True):
    """A JSON object with the tool's name and arguments, or an array of such objects."""

    name_key: str = "name"
    #: Accepted keys of the arguments; grammars use the first key.
    arguments_keys: tuple[str, ...] = ("arguments", "parameters")
    #: True if grammars write an array of calls.
    is_list: bool = False

    @property
    def first_characters(self) -> str:
        """The first characters of a JSON object or array."""
        return "{["


class NamedForm(CallForm, frozen=True, tag="named", kw_only=True):
    """The tool's name, a mark, and the arguments as a JSON object."""

    name_end: str
    #: The text before the name, which parsers don't require.
    name_prefix: str = ""
    #: The mark between the name and the call's id; "" if calls have no ids.
    id_begin: str = ""


class TaggedForm(CallForm, frozen=True, tag="tagged", kw_only=True):
    """The tool's name, and each argument between marks; strings are written unquoted."""

    name_end: str
    parameter_begin: str
    key_end: str
    parameter_end: str
    #: White space around a value that is not part of it: a line break, or "".
    value_space: str = ""
    #: True if grammars write True and False instead of true and false.
    has_python_words: bool = False


class LooseForm(CallForm, frozen=True, tag="loose", kw_only=True):
    """The tool's name, and a JSON-like object with unquoted keys and with `quote` around
    strings."""

    quote: str


class PythonForm(CallForm, frozen=True, tag="python", kw_only=True):
    """Calls in Python syntax with literal keyword arguments, in a list or alone."""

    is_list: bool = False


class ChannelForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An answer in the harmony format: several messages, each `start role HEADER message BODY end`.

    A header is `channel NAME recipient constrain TYPE`. Words in lower case are the fields below.
    The prompt ends after the role of the first message.
    """

    start: str
    role: str
    channel: str
    #: The mark before the name of a message's recipient.
    recipient: str
    constrain: str
    message: str
    #: The marks that end a body: before another message, after a call, and after the answer.
    ends: tuple[str, str, str]
    #: The prefix of a tool's name when it is the recipient.
    call_prefix: str
    reasoning_channel: str
    call_channel: str
    answer_channel: str


AnyCallForm = JsonForm | NamedForm | TaggedForm | LooseForm | PythonForm
