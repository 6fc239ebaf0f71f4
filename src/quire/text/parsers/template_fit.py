"""Adapts a dialect, so that grammars write calls exactly as the chat template renders them.

Models of one dialect differ in white space around marks, in JSON separators and in the order of
keys. Parsers accept all variants. But an answer hits the prefix cache in the next turn only if the
chat template renders it with the same tokens. Called when a server starts.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from quire.errors import InvalidRequestError
from quire.text.parsers.call_forms import (
    AnyCallForm,
    JsonForm,
    LooseForm,
    NamedForm,
    PythonForm,
    TaggedForm,
)
from quire.text.parsers.dialect import Dialect
from quire.text.parsers.tool_use import Tool

_NAMES = ("quire_probe", "quire_probe_two")
_ARGUMENTS: Mapping[str, Any] = {"zeta": [1, "x"], "beta": "y", "alpha": {"key": "v"}, "yes": True}
"""Arguments of the probe calls, whose keys are not in alphabetical order."""
_IDS = ("123456789", "987654321")  # Mistral's templates require nine characters


def fitted(dialect: Dialect, render: Callable[..., str]) -> Dialect:
    """The dialect with the details of its first call format set to those in the template's output.

    `render` is `ChatTemplate.render`. The dialect is returned unchanged if the template renders no
    calls in its first format.
    """
    if not dialect.calls:
        return dialect
    first, *others = dialect.calls
    # Two calls also show the text between calls; some templates accept only one call.
    for num_calls in (2, 1):
        found = _found(first, _rendered(render, num_calls), num_calls)
        if found is not None:
            return msgspec.structs.replace(dialect, calls=(found, *others))
    return dialect


def _rendered(render: Callable[..., str], num_calls: int) -> str:
    """The rendered text of a conversation with tool calls; "" if the template refuses it."""
    calls = [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": dict(_ARGUMENTS)}}
        for name, id_ in zip(_NAMES[:num_calls], _IDS, strict=False)
    ]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    tools = [Tool(name, "").as_openai() for name in _NAMES]
    try:
        return render(messages, tools=tools, add_generation_prompt=False)
    except InvalidRequestError:
        return ""


def _found(form: AnyCallForm, text: str, num_calls: int) -> AnyCallForm | None:
    """The format with the details found in `text`; None if `text` has no calls in this format."""
    for arguments, sorts_keys in ((_ARGUMENTS, False), (_sorted(_ARGUMENTS), True)):
        pattern = _CallsPattern(form, arguments).of(_NAMES[:num_calls])
        match = re.search(pattern, text)
        if match is not None:
            return _changed(form, match.groupdict(), sorts_keys=sorts_keys)
    return None


def _changed(form: AnyCallForm, groups: dict[str, str], *, sorts_keys: bool) -> AnyCallForm:
    if isinstance(form, JsonForm):
        key = groups.pop("arguments_key")
        keys = (key, *(each for each in form.arguments_keys if each != key))
        form = msgspec.structs.replace(form, arguments_keys=keys)
    if isinstance(form, TaggedForm):
        form = msgspec.structs.replace(form, has_python_words=groups.pop("word") == "True")
    return msgspec.structs.replace(form, sorts_keys=sorts_keys, **groups)


def _sorted(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: _sorted(value[key]) for key in sorted(value, key=str.lower)}


class _CallsPattern:
    """Builds a regular expression for calls in a format. Each detail that varies is a group, named
    after the format's field for this detail.

    White space between two marks belongs to the first mark, but between two calls it belongs to the
    separator. The methods must be called in the order of the text.
    """

    def __init__(self, form: AnyCallForm, arguments: Mapping[str, Any]) -> None:
        self._form = form
        self._arguments = arguments
        self._known: set[str] = set()

    def of(self, names: tuple[str, ...]) -> str:
        """The pattern for calls of tools with these names, in one pair of begin and end marks if
        the format allows it."""
        form = self._form
        is_list = isinstance(form, (JsonForm, PythonForm)) and form.is_list
        opened, closed = (r"\[", r"\]") if is_list else ("", "")
        text = self._mark("begin", after=r"\s*") + opened
        for at, name in enumerate(names):
            if at and form.is_repeated:
                text += self._item_separator() if is_list else self._separator()
            elif at:
                text += closed + self._mark("end", before=r"\s*") + self._separator()
                text += self._mark("begin", after=r"\s*") + opened
            text += self._mark("call_begin", after=r"\s*") + self._call(name)
            text += self._mark("call_end", before=r"\s*")
        return text + closed + self._mark("end", before=r"\s*")

    def _group(self, name: str, pattern: str) -> str:
        """A group with this pattern; if the group already exists, a back-reference to it."""
        if name in self._known:
            return f"(?P={name})"
        self._known.add(name)
        return f"(?P<{name}>{pattern})"

    def _mark(self, field: str, before: str = "", after: str = "") -> str:
        """A pattern for the mark in `field`, with any white space between its words; "" if the
        format does not have this mark."""
        mark: str = getattr(self._form, field)
        words = mark.split()
        if not words:
            return self._group(field, r"\s*") if mark else ""
        return self._group(field, before + r"\s*".join(map(re.escape, words)) + after)

    def _separator(self) -> str:
        words = [re.escape(word) for word in self._form.separator.split()]
        return self._group("separator", r"\s*" + "".join(rf"{word}\s*" for word in words))

    def _item_separator(self) -> str:
        return self._group("item_separator", r",\s*")

    def _key_separator(self) -> str:
        return self._group("key_separator", r":\s*")

    def _call(self, name: str) -> str:
        form = self._form
        if isinstance(form, JsonForm):
            head = r"\{" + re.escape(json.dumps(form.name_key)) + self._key_separator()
            head += f'"{name}"' + self._item_separator()
            keys = "|".join(map(re.escape, form.arguments_keys))
            head += f'"{self._group("arguments_key", keys)}"' + self._key_separator()
            # Some templates add the call's id, which a model can't predict.
            call_id = f'(?:{self._item_separator()}"id"{self._key_separator()}"[0-9]*")?'
            return head + self._json(self._arguments) + call_id + r"\}"
        if isinstance(form, NamedForm):
            head = re.escape(form.name_prefix) + name + self._mark("name_end", after=r"\s*")
            return head + self._json(self._arguments)
        if isinstance(form, TaggedForm):
            return name + self._mark("name_end", after=r"\s*") + self._tagged()
        if isinstance(form, LooseForm):
            return name + re.escape(_loose(self._arguments, form.quote))
        return r"(?!)"  # calls of Python functions have no details that vary

    def _json(self, value: Any) -> str:
        """A pattern for the value as JSON, with its separators as groups."""
        if isinstance(value, Mapping):
            members: list[str] = []
            for key, each in value.items():
                separator = self._item_separator() if members else ""
                members.append(f'{separator}"{key}"{self._key_separator()}{self._json(each)}')
            return r"\{" + "".join(members) + r"\}"
        if isinstance(value, list):
            items: list[str] = []
            for each in value:
                items.append((self._item_separator() if items else "") + self._json(each))
            return r"\[" + "".join(items) + r"\]"
        return re.escape(json.dumps(value))

    def _tagged(self) -> str:
        text = ""
        for key, value in self._arguments.items():
            text += self._mark("parameter_begin") + key + self._mark("key_end")
            space = self._group("value_space", r"\s*")
            written = value if isinstance(value, str) else self._json(value)
            if value is True:
                written = self._group("word", "true|True")
            text += space + written + self._group("value_space", "")
            text += self._mark("parameter_end", after=r"\s*")
        return text


def _loose(value: Any, quote: str) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_loose(each, quote)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_loose(each, quote) for each in value) + "]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)
