"""Converts transformers' `response_template` in tokenizer_config.json to a dialect.

A response template describes by marks and regular expressions which parts of a message are
reasoning, text or calls. If quire's formats can't express a part, the template is refused with a
reason. Called when a server starts.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from quire.text.parsers.call_forms import (
    AnswerMarks,
    AnyCallForm,
    ChannelForm,
    JsonForm,
    LooseForm,
    NamedForm,
    Reasoning,
    TaggedForm,
)
from quire.text.parsers.dialect import Dialect
from quire.text.parsers.mark_patterns import SPACE, Parts, refuse, sequences
from quire.text.parsers.reading.text_source import Markers

NAME = "response_template"
_VERSION = 1
_REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
_INNER_MARKS = ("name_prefix", "name_end", "parameter_begin", "key_end", "parameter_end")
_MARKS = ("begin", "end", "call_begin", "call_end", "quote", *_INNER_MARKS)
_TAG = re.compile(r"<[^<>]+>|\[[^\[\]\s]+\]")


class _ResponseField(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The description of one part of a message, with the fields of transformers' documentation."""

    open: str | list[str] | None = None
    open_pattern: str | None = None
    close: str | list[str] | None = None
    close_pattern: str | None = None
    content: str = "text"
    content_args: dict[str, Any] = {}
    repeats: bool = False
    join: str | None = None
    optional: bool = True
    transform: Any = None
    transform_each: bool = False

    @property
    def begins(self) -> list[Parts]:
        """The marks that open the part. If empty, the part is all text outside of other parts."""
        return _parts_of(self.open, self.open_pattern)

    @property
    def ends(self) -> list[Parts]:
        return _parts_of(self.close, self.close_pattern)


class _ResponseTemplate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    fields: dict[str, _ResponseField]
    version: int = _VERSION
    defaults: dict[str, Any] = {}
    start_anchor: str | list[str] | None = None
    start_anchor_pattern: str | None = None


def read_response_template(
    source: object, recognised: Dialect, is_special: Callable[[str], bool]
) -> Dialect:
    """The dialect that a response template describes.

    `source` is its value in tokenizer_config.json. `recognised` is the dialect found by the chat
    template. It is returned if it agrees with the response template, since it also accepts frequent
    mistakes of the models. `is_special(mark)` is True if a mark is a special token. Raises
    UnmappableError.
    """
    try:
        template = msgspec.convert(source, _ResponseTemplate)
    except msgspec.ValidationError as error:
        refuse(f"it has an unknown form ({error})")
    if template.version != _VERSION:
        refuse(f"its version is {template.version}, not {_VERSION}")
    names = {*_REASONING_NAMES, "content", "tool_calls"}
    if unknown := sorted({*template.fields, *template.defaults} - names - {"role"}):
        refuse(f"it fills a message's field {unknown[0]!r}")
    if recognised.channels is not None and _is_of_channels(template.fields, recognised.channels):
        return recognised
    found = _plain_dialect(template.fields)
    if _agree(found, recognised):
        return recognised
    _check_marks(found)
    ends = _message_ends(template.fields)
    if ends and not any(map(is_special, ends)):
        refuse(f"its content ends at {ends[0]!r}, which is not a special token")
    return _completed(found, recognised)


def _check_marks(found: Dialect) -> None:
    """Raise UnmappableError if, among marks that are searched together, one begins with another."""
    reasoning, answer = found.reasoning, found.answer
    marks = [form.marker for form in found.calls]
    marks += [answer.begin, answer.end] if answer is not None else []
    try:
        Markers(filter(None, marks))
        Markers(reasoning.end if reasoning is not None else ())
    except ValueError as error:
        refuse(str(error))


def _plain_dialect(fields: Mapping[str, _ResponseField]) -> Dialect:
    thoughts = [field for name, field in fields.items() if name in _REASONING_NAMES]
    if len(thoughts) > 1:
        refuse("it has two fields of reasoning")
    reasoning = _reasoning(thoughts[0]) if thoughts else None
    answer = _answer(fields["content"]) if "content" in fields else None
    form = _call_form(fields["tool_calls"]) if "tool_calls" in fields else None
    if form is not None and form.end in _message_ends(fields):
        form = msgspec.structs.replace(form, end="")  # an end token, which is not part of the text
    return Dialect(
        name=NAME,
        reasoning=reasoning,
        answer=answer,
        calls=() if form is None else (form,),
        special_tokens=_tags_of(reasoning, answer, form),
    )


def _completed(found: Dialect, recognised: Dialect) -> Dialect:
    """The dialect with the missing fields filled in from the recognized dialect."""
    if not found.calls:
        tokens = found.special_tokens | recognised.special_tokens
        found = msgspec.structs.replace(found, calls=recognised.calls, special_tokens=tokens)
    return msgspec.structs.replace(found, call_ids=recognised.call_ids)


def _message_ends(fields: Mapping[str, _ResponseField]) -> list[str]:
    """The end tokens after an answer's text, if the text has no begin mark."""
    field = fields.get("content")
    return [] if field is None or field.begins else _literals(field.ends)


# Parts of text.


def _reasoning(field: _ResponseField) -> Reasoning:
    _check_text(field, "reasoning")
    begins, ends = _literals(field.begins), _literals(field.ends)
    if not begins or not ends:
        refuse("its reasoning has no marks around it")
    return Reasoning(begin=tuple(begins), end=tuple(ends))


def _answer(field: _ResponseField) -> AnswerMarks | None:
    """The marks around the answer's text. None if it has no begin mark: then the answer is the text
    outside of other parts, and its end marks are end tokens, which are not part of the text."""
    _check_text(field, "content")
    begins, ends = _literals(field.begins), _literals(field.ends)
    if not begins:
        return None
    if len(begins) > 1 or len(ends) != 1:
        refuse("its content has several marks")
    return AnswerMarks(begin=begins[0], end=ends[0])


def _check_text(field: _ResponseField, what: str) -> None:
    is_stripped = field.content_args in ({}, {"strip": True})
    if field.content != "text" or field.transform is not None or not is_stripped or field.repeats:
        refuse(f"its {what} is not one plain text")


# Calls.


def _call_form(field: _ResponseField) -> AnyCallForm:
    begins, ends = field.begins, field.ends or [("",)]
    if len(begins) != 1 or len(ends) != 1:
        refuse("its calls begin or end with one of several marks")
    (begin,), (end,) = begins, _literals(ends)
    name, arguments = _name_and_arguments(field)
    if len(begin) == 1:
        return _json_form(field, begin[0], end, name, arguments)
    if len(begin) != 3 or name != begin[1] or arguments != "content" or field.transform_each:
        refuse("its calls have their names in an unknown place")
    opened, _, name_end = begin
    mark, call_begin = _split_begin(opened)
    if field.content == "xml-inline":
        return _tagged_form(field, (mark, call_begin, name_end), end)
    if field.content != "json":
        refuse(f"its calls are of the form {field.content!r}")
    if field.content_args:
        if name_end.strip():
            refuse("its calls have a mark before their bare keys")
        quote = _quote(field.content_args)
        return LooseForm(begin=mark, call_begin=call_begin, end=end, quote=quote)
    return NamedForm(begin=mark, call_begin=call_begin, name_end=name_end, end=end)


def _name_and_arguments(field: _ResponseField) -> tuple[str, str]:
    """The paths of a call's name and arguments in the parsed part, such as "content.name"."""
    transform = field.transform
    function = transform.get("function") if isinstance(transform, dict) else None
    if set(transform or ()) - {"type", "function"} or not field.repeats | field.transform_each:
        refuse("its calls are not converted to a list of functions")
    if function == "{content}" and not field.transform_each:
        return "content.name", "content.arguments"
    if not isinstance(function, dict) or set(function) != {"name", "arguments"}:
        refuse("its calls are not converted to functions with name and arguments")
    paths = [str(function[key]) for key in ("name", "arguments")]
    if not all(re.fullmatch(r"\{\w+(\.\w+)?\}", path) for path in paths):
        refuse("its calls take names or arguments from an unknown place")
    name, arguments = (path.strip("{}") for path in paths)
    return name, arguments


def _json_form(field: _ResponseField, begin: str, end: str, name: str, arguments: str) -> JsonForm:
    if field.content != "json" or field.content_args:
        refuse("its calls have no name, or are not JSON")
    prefix = "" if field.transform_each else "content."
    keys = [path.removeprefix(prefix) for path in (name, arguments) if path.startswith(prefix)]
    if len(keys) != 2 or any("." in key for key in keys):
        refuse("its calls have names or arguments inside of other members")
    mark, call_begin = _split_begin(begin)
    return JsonForm(
        begin=mark,
        call_begin=call_begin,
        end=end,
        name_key=keys[0],
        arguments_keys=(keys[1],),
        is_list=field.transform_each,
        is_repeated=field.transform_each,
    )


def _tagged_form(field: _ResponseField, begin: tuple[str, str, str], end: str) -> TaggedForm:
    args = dict(field.content_args)
    values = sequences(str(args.pop("tag_pattern", "")))
    parser = args.pop("value_parser", {"name": "text"})
    if args or parser not in (
        {"name": "text"},
        {"name": "json", "args": {"allow_non_json": True}},
    ):
        refuse("its arguments are read in an unknown way")
    if len(values) != 1 or len(values[0]) != 5 or values[0][1::2] != ("key", "value"):
        refuse("its arguments are found by an unknown pattern")
    parameter_begin, _, key_end, _, parameter_end = values[0]
    mark, call_begin, name_end = begin
    call_end, _, rest = end.partition(SPACE)
    if call_begin and not rest:
        refuse("it has no mark that ends a single call")
    has_space = key_end.endswith(SPACE) and parameter_end.startswith(SPACE)
    return TaggedForm(
        begin=mark,
        call_begin=call_begin,
        name_end=name_end,
        parameter_begin=parameter_begin,
        key_end=key_end.rstrip(SPACE),
        value_space="\n" if has_space else "",
        parameter_end=parameter_end.lstrip(SPACE),
        call_end=call_end if rest else "",
        end=rest or call_end,
    )


def _quote(content_args: Mapping[str, Any]) -> str:
    args = dict(content_args)
    pairs = args.pop("string_delims", None)
    if args != {"unquoted_keys": True} or not isinstance(pairs, list) or len(pairs) != 1:
        refuse("its arguments have an unknown format other than JSON")
    quote = pairs[0][0]
    if pairs[0] != [quote, quote]:
        refuse("its strings begin and end with different marks")
    return str(quote)


def _split_begin(mark: str) -> tuple[str, str]:
    """Split a begin mark into its first tag, with the white space after it, and the rest. The tag
    is "" if the mark does not begin with a tag such as `<tool_call>`."""
    found = _TAG.match(mark)
    if found is None:
        return "", mark
    rest = mark[found.end() :].lstrip()
    return mark[: len(mark) - len(rest)], rest


# The whole template.


def _parts_of(literal: str | list[str] | None, pattern: str | None) -> list[Parts]:
    if literal is not None and pattern is not None:
        refuse("it has both a mark and a pattern for one place")
    if pattern is not None:
        return sequences(pattern)
    if literal is None:
        return []
    return [(each,) for each in ([literal] if isinstance(literal, str) else literal)]


def _literals(found: list[Parts]) -> list[str]:
    if any(len(parts) != 1 for parts in found):
        refuse("it captures a part of a mark that is not the name of a call")
    return [parts[0] for parts in found]


def _tags_of(*forms: msgspec.Struct | None) -> frozenset[str]:
    """All tags and words in the marks, since any of them may be a special token."""
    marks: list[str] = []
    for form in forms:
        for name in _MARKS:
            value = getattr(form, name, ())
            marks += [value] if isinstance(value, str) else value
    tags = {tag for mark in marks for tag in (*_TAG.findall(mark), *mark.split())}
    return frozenset(tags)


def _agree(found: Dialect, recognised: Dialect) -> bool:
    """True if the recognized dialect has the same parts with the same marks."""
    if recognised.channels is not None or found.answer is not None:
        return False
    mine, other = found.reasoning, recognised.reasoning
    if (mine is None) != (other is None):
        return False
    if mine is not None and other is not None:
        begins, ends = ([each.strip() for each in marks] for marks in (other.begin, other.end))
        if not {each.strip() for each in mine.begin} <= set(begins):
            return False
        if not {each.strip() for each in mine.end} <= set(ends):
            return False
    return not found.calls or any(_has_marks_of(each, found.calls[0]) for each in recognised.calls)


def _has_marks_of(form: AnyCallForm, other: AnyCallForm) -> bool:
    if type(form) is not type(other) or _words(form) != _words(other):
        return False
    if isinstance(form, JsonForm) and isinstance(other, JsonForm):
        keys = other.arguments_keys[0] in form.arguments_keys
        return keys and (form.name_key, form.is_list) == (other.name_key, other.is_list)
    return not isinstance(form, LooseForm) or form.quote == getattr(other, "quote", None)


def _words(form: AnyCallForm) -> tuple[str, ...]:
    """All marks of a format, without white space."""
    begin, end = form.begin + form.call_begin, form.call_end + form.end
    inner = [getattr(form, name, "") for name in _INNER_MARKS]
    return tuple("".join(mark.split()) for mark in (begin, *inner, end))


def _is_of_channels(fields: Mapping[str, _ResponseField], form: ChannelForm) -> bool:
    """True if the fields' marks are the headers of this harmony-like format."""
    opens = {
        name: form.channel + channel + form.message
        for name, channel in (
            *((name, form.reasoning_channel) for name in _REASONING_NAMES),
            ("content", form.answer_channel),
        )
    }
    texts = {name: field for name, field in fields.items() if name != "tool_calls"}
    if not texts or any(field.open != opens[name] for name, field in texts.items()):
        return False
    if "tool_calls" not in fields:
        return True
    calls = fields["tool_calls"]
    sample = f"{form.channel}{form.call_channel} {form.recipient}{form.call_prefix}f "
    try:
        found = re.fullmatch(
            calls.open_pattern or "", f"{sample}{form.constrain}json{form.message}", re.DOTALL
        )
    except re.error:
        return False
    name, arguments = _name_and_arguments(calls)
    is_json = (calls.content, calls.content_args, arguments) == ("json", {}, "content")
    return found is not None and is_json and found.groupdict() == {name: "f"}
