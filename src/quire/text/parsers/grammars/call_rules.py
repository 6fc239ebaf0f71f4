"""Writes grammar rules for tool calls, in each call format of the dialects.

The parser of the same format can parse all allowed calls. A term is an expression in the body of a
grammar rule. Called by `message_rules`.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quire.errors import InvalidRequestError
from quire.text.grammars.lark import literal
from quire.text.grammars.schemas.translate import JsonStyle
from quire.text.parsers.call_forms import (
    AnyCallForm,
    JsonForm,
    LooseForm,
    NamedForm,
    PythonForm,
    TaggedForm,
)
from quire.text.parsers.grammars.remembered_terms import json_term, style_of, understood_schema
from quire.text.parsers.grammars.rules import Rules
from quire.text.parsers.grammars.text_values import TextValues
from quire.text.parsers.grammars.value_rules import (
    SILENT_KEYWORDS,
    UnwritableError,
    ValueRules,
    ValueSyntax,
)
from quire.text.parsers.reading.call_reader import NAME, PYTHON_NAME
from quire.text.parsers.reading.loose_objects import LOOSE_KEY
from quire.text.parsers.reading.python_calls import KEYWORD
from quire.text.parsers.tool_use import Tool

NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}

_OBJECT_KEYWORDS = frozenset({"type", "properties", "required", "additionalProperties"})
_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,40}/"


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A tool whose calls the grammar allows."""

    tool: Tool
    #: The path of the tool's schema in the request, for errors.
    origin: str
    #: True if unsupported parts of the tool's schema are ignored; otherwise they raise an error.
    is_loose: bool

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the tool's arguments, whose type is object."""
        schema = self.tool.parameters
        if schema is None:
            return dict(NO_ARGUMENTS)
        if schema.get("type", "object") != "object":
            raise InvalidRequestError(
                f"{self.origin}: #: type is {schema['type']!r}, but arguments are an object",
                self.origin,
            )
        return {"type": "object", **schema}

    def with_sorted_keys(self) -> "CalledTool":
        """The tool with the properties of all objects in its schema in alphabetical order."""
        parameters = _with_sorted_properties(self.tool.parameters)
        return replace(self, tool=replace(self.tool, parameters=parameters))

    @property
    def understood(self) -> Mapping[str, Any]:
        """The schema with its supported keywords only, for call formats that don't write JSON."""
        try:
            return understood_schema(self.schema, self.origin, is_loose=self.is_loose)
        except InvalidRequestError as error:
            if not self.is_loose:
                raise self.refusal(str(error).removeprefix(f"{self.origin}: ")) from error
            return ANY_ARGUMENTS

    def refusal(self, why: object) -> InvalidRequestError:
        """The error for a schema that can't be enforced."""
        return InvalidRequestError(
            f"{self.origin}: {why}; this model's format of calls can't enforce that: leave it"
            " out, or call the tool without strict",
            self.origin,
        )


def _with_sorted_properties(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_sorted_properties(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    changed = {key: _with_sorted_properties(each) for key, each in schema.items()}
    if isinstance(properties := changed.get("properties"), dict):
        names = sorted(properties, key=str.lower)
        changed["properties"] = {name: properties[name] for name in names}
    return changed


def call_term(rules: Rules, form: AnyCallForm, called: CalledTool) -> str:
    """A grammar term for one call of a tool, without the marks around calls."""
    called = called.with_sorted_keys() if form.sorts_keys else called
    name = called.tool.name
    pattern = PYTHON_NAME if isinstance(form, PythonForm) else NAME
    if not isinstance(form, JsonForm) and not re.fullmatch(pattern, name):
        raise InvalidRequestError(
            f"{called.origin.partition('.')[0]}: the tool name {name!r} has a character that this"
            " model's calls can't have; use letters, digits, _ and -",
            "tools",
        )
    if isinstance(form, JsonForm):
        key, separator = form.key_separator, form.item_separator
        head = f"{{{_json(form.name_key)}{key}{_json(name)}{separator}"
        head += f"{_json(form.arguments_keys[0])}{key}"
        arguments = json_arguments(called, style_of(form))
        return rules.add("call", f"{literal(head)} {arguments} {literal('}')}")
    if isinstance(form, NamedForm):
        head = rules.tokens.terms(form.name_prefix + name + form.name_end)
        return rules.add("call", f"{head} {json_arguments(called, style_of(form))}")
    if isinstance(form, TaggedForm):
        return _tagged_call(rules, form, called)
    if isinstance(form, LooseForm):
        arguments = _members(rules, _loose_syntax(rules, form), called)
        return rules.add("call", f'{literal(name + "{")} {arguments} "}}"')
    arguments = _members(rules, _PYTHON, called)
    return rules.add("call", f"{literal(name + '(')} {arguments} {literal(')')}")


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def json_arguments(called: CalledTool, style: JsonStyle) -> str:
    """A grammar term for the arguments as a JSON object."""
    try:
        return json_term(called.schema, called.origin, style, is_loose=called.is_loose)
    except InvalidRequestError:
        if not called.is_loose:
            raise
        return json_term(ANY_ARGUMENTS, called.origin, style, is_loose=True)


def _tagged_call(rules: Rules, form: TaggedForm, called: CalledTool) -> str:
    schema = called.understood
    mark = form.parameter_end.strip()
    values = TextValues(rules, schema, form)
    behind = form.parameter_end[form.parameter_end.index(mark) + len(mark) :]

    def parameter(key: str, value: str) -> str:
        before = rules.tokens.terms(form.parameter_begin) + f" {key} "
        before += rules.tokens.terms(form.key_end + form.value_space)
        return rules.add("parameter", f"{before} {value} {literal(behind)}")

    parts = [rules.tokens.terms(called.tool.name + form.name_end)]
    properties = schema.get("properties")
    if unknown := sorted(set(schema) - SILENT_KEYWORDS - _OBJECT_KEYWORDS):
        _refuse_unless_loose(called, f"{unknown[0]} is not supported")
    if properties is None and schema.get("additionalProperties") is not False:
        return rules.add("call", f"{parts[0]} {parameter(_ANY_KEY, values.any_text())}*")
    required = set(schema.get("required", ()))
    if missing := sorted(required - set(properties or ())):
        _refuse_unless_loose(called, f"required names {missing[0]!r}, which is no property")
    for key, each in (properties or {}).items():
        try:
            value = rules.attempt(partial(values.value, key, each))
        except UnwritableError as error:
            _refuse_unless_loose(called, error)
            value = values.any_text()
        is_readable = key == key.strip() and form.key_end.split()[0] not in key
        if not is_readable:
            _refuse_unless_loose(called, f"the name {key!r} can't be written")
            continue
        parts.append(parameter(literal(key), value) + ("" if key in required else "?"))
    return rules.add("call", " ".join(parts))


def _refuse_unless_loose(called: CalledTool, why: object) -> None:
    if not called.is_loose:
        raise called.refusal(why)


def _members(rules: Rules, syntax: ValueSyntax, called: CalledTool) -> str:
    """A grammar term for the arguments as members of an object. For a loose tool, an argument with
    an unsupported schema may have any value."""
    schema = called.understood

    def write(arguments: Mapping[str, Any]) -> str:
        return ValueRules(rules, syntax, schema).arguments(arguments)

    try:
        return rules.attempt(partial(write, schema))
    except UnwritableError as error:
        if not called.is_loose:
            raise called.refusal(error) from error
    properties: dict[str, Any] = {}
    for key, each in schema.get("properties", {}).items():
        trial = ValueRules(Rules(rules.tokens), syntax, schema)
        if _is_writable(partial(trial.arguments, {"properties": {key: True}})):
            properties[key] = each if _is_writable(partial(trial.value, each)) else True
    required = [key for key in schema.get("required", ()) if key in properties]
    return write({"type": "object", "properties": properties, "required": required})


def _is_writable(write: Callable[[], str]) -> bool:
    try:
        write()
    except UnwritableError:
        return False
    return True


def _checked(name: str, pattern: re.Pattern[str]) -> str:
    if not pattern.fullmatch(name):
        raise UnwritableError(f"the name {name!r} can't be written")
    return name


def _without(text: str, mark: str) -> str:
    if mark in text:
        raise UnwritableError(f"the value {text!r:.80} can't be written")
    return text


def _loose_syntax(rules: Rules, form: LooseForm) -> ValueSyntax:
    quote = rules.tokens.terms(form.quote)
    return ValueSyntax(
        string=rules.add("string", f"{quote} {rules.text_before(form.quote)}"),
        quoted=lambda text: f"{quote} {literal(_without(text, form.quote))} {quote}",
        argument=lambda name: literal(f"{_checked(name, LOOSE_KEY)}:"),
        key=lambda name: literal(f"{_checked(name, LOOSE_KEY)}:"),
        any_key=_ANY_KEY + ' ":"',
    )


_PYTHON = ValueSyntax(
    string=r'/"(?:[^"\\\x00-\x1f\x7f]|\\["\\nt])*"/',
    quoted=lambda text: literal(_json(text)),
    argument=lambda name: literal(f"{_checked(name, KEYWORD)}="),
    key=lambda name: literal(f"{_json(name)}: "),
    any_key=_ANY_KEY + ' "="',
    words=("True", "False", "None"),
    separator=", ",
)
