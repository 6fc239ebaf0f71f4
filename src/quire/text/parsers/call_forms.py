"""How dialects write calls and reasoning: the fields of their data files.

Plain data. Read by the parser, and by what makes grammars, so that both know the same form.
"""

import msgspec


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Marks around the reasoning before an answer. The first of each is what grammars write.

    is_ended_by_calls: a call may begin in the reasoning, and so end it.
    """

    begin: tuple[str, ...]
    end: tuple[str, ...]
    is_ended_by_calls: bool = False


class AnswerMarks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Marks around the text of an answer, in models that put it between such."""

    begin: str
    end: str


class CallForm(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="syntax"
):
    """One way to write calls: begin (call_begin CALL call_end separator)... end.

    Of each mark, words matter when it is read: any white space may stand between them. What
    grammars write is the mark to the letter. Ends may be missing in what is read.

    begin: opens one or several calls; "" with a call_begin: each call stands alone; "" without:
        the whole message is calls, and only callable names make it one.
    separator: between calls that stand in one pair of begin and end.
    is_repeated: several calls stand in one pair of begin and end; else each has its own.
    needs_known_name: what names no callable tool is text.
    item_separator, key_separator: in the JSON that grammars write. sorts_keys: they write
        arguments in the order of the alphabet. All as the model's template writes a history.
    """

    begin: str = ""
    end: str = ""
    call_begin: str = ""
    call_end: str = ""
    separator: str = ""
    is_repeated: bool = False
    needs_known_name: bool = False
    item_separator: str = ", "
    key_separator: str = ": "
    sorts_keys: bool = False

    @property
    def marker(self) -> str:
        """What announces a call in a text; "": only its place, the start of the message."""
        return (self.begin or self.call_begin).strip()

    @property
    def first_characters(self) -> str:
        """What a call begins with behind its marker; "": something else than { or [."""
        return ""


class JsonForm(CallForm, frozen=True, tag="json", kw_only=True):
    """A JSON object with the tool's name and arguments, or an array of such objects.

    arguments_keys: names of the member with the arguments; grammars write the first.
    is_list: grammars write an array.
    """

    name_key: str = "name"
    arguments_keys: tuple[str, ...] = ("arguments", "parameters")
    is_list: bool = False

    @property
    def first_characters(self) -> str:
        """As it is for every JSON object and array."""
        return "{["


class NamedForm(CallForm, frozen=True, tag="named", kw_only=True):
    """The tool's name, a mark, and the arguments as a JSON object.

    name_prefix: before the name; may be missing in what is read.
    id_begin: behind the name, before an id of the call; "": calls have none.
    """

    name_end: str
    name_prefix: str = ""
    id_begin: str = ""


class TaggedForm(CallForm, frozen=True, tag="tagged", kw_only=True):
    """The tool's name, and each argument between marks; strings are written as they are.

    value_space: what stands on both sides of a value and is not part of it: a line break, or "".
    has_python_words: grammars write True and False.
    """

    name_end: str
    parameter_begin: str
    key_end: str
    parameter_end: str
    value_space: str = ""
    has_python_words: bool = False


class LooseForm(CallForm, frozen=True, tag="loose", kw_only=True):
    """The tool's name and an object as in JSON, with bare keys and `quote` around strings."""

    quote: str


class PythonForm(CallForm, frozen=True, tag="python", kw_only=True):
    """Calls of Python functions with keyword arguments that are literals; in a list or alone."""

    is_list: bool = False


class ChannelForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A message made of messages: start role HEADER message BODY end, again and again.

    A header is: channel NAME recipient constrain TYPE. The first stands in the prompt up to its
    role. recipient: before the name of whom a message is for. call_prefix: what the names of
    tools begin with there. ends: behind a body, the first where another follows, the second
    behind a call, the third behind the answer.
    """

    start: str
    role: str
    channel: str
    recipient: str
    constrain: str
    message: str
    ends: tuple[str, str, str]
    call_prefix: str
    reasoning_channel: str
    call_channel: str
    answer_channel: str


AnyCallForm = JsonForm | NamedForm | TaggedForm | LooseForm | PythonForm
