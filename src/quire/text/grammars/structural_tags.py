"""Converts structural tags (free text with tagged, constrained parts) to a grammar.

A tagged part obeys a JSON schema or a regular expression. There are two forms of requests:
`{"structures": [...], "triggers": [...]}`, and the nested formats of XGrammar and vLLM, `{"type":
"structural_tag", "format": {...}}`. Each becomes one Lark grammar. Called by `grammar_text`.

Free text must end with the answer, or at the first end text of the tag around it. All other formats
with free text are refused.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from quire.errors import InvalidRequestError
from quire.text.grammars.lark import expression, literal
from quire.text.grammars.limits import MAX_EXPRESSION_CHARACTERS, MAX_NESTING, MAX_TAGS
from quire.text.grammars.schemas.reader import read_json
from quire.text.grammars.schemas.refusals import at, refusal
from quire.text.grammars.schemas.translate import JsonStyle, json_term
from quire.text.grammars.tag_fields import TagFields

_ANYTHING = "/(?s:.*)/"
_TOKEN_NAME = re.compile(r"<[^<>\s]+>")
_MAX_REPETITIONS = 1_000


def structural_tag_rules(tag: object, origin: str, style: JsonStyle) -> str:
    """The Lark grammar for `tag`, which is an object or its JSON text.

    Raises InvalidRequestError that names `origin` and the place in the tag.
    """
    parsed = read_json(tag, origin)
    rules = _Rules(origin, style)
    if isinstance(parsed, dict) and "structures" in parsed:
        body = rules.triggered("#", _as_triggered_tags(parsed, TagFields(origin)), is_last=True)
    elif isinstance(parsed, dict) and "format" in parsed:
        body = rules.format(at("#", "format"), parsed["format"], is_last=True)
    else:
        raise refusal(origin, "#", 'a structural tag has "format", or "structures" and "triggers"')
    return "\n".join([f"start: {body}", *rules.lines])


def _as_triggered_tags(parsed: dict[str, Any], fields: TagFields) -> dict[str, Any]:
    """Convert a structural tag with "structures" to a format of type triggered_tags."""
    tags = []
    for index, structure in enumerate(fields.objects("#", parsed, "structures")):
        pointer = at("#", "structures", index)
        content = {"type": "json_schema", "json_schema": structure.get("schema", True)}
        fields.check_names(pointer, structure, ("begin", "schema", "end"))
        tags.append({**structure, "content": content})
    return {"triggers": parsed.get("triggers"), "tags": tags}


class _Rules:
    """Writes a Lark term for each format. The rules that the terms refer to are collected in
    `lines`."""

    def __init__(self, origin: str, style: JsonStyle) -> None:
        self.lines: list[str] = []
        self._origin = origin
        self._style = style
        self._fields = TagFields(origin)
        self._depth = 0
        self._num_formats = 0
        self._makers: dict[str, Callable[[str, dict[str, Any], bool], str]] = {
            "any_text": self._any_text,
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "optional": self._repeated,
            "or": self._alternatives,
            "plus": self._repeated,
            "regex": self._regex,
            "repeat": self._repeated,
            "sequence": self._sequence,
            "star": self._repeated,
            "tag": self._tag,
            "tags_with_separator": self._tags_with_separator,
            "token": self._token,
            "triggered_tags": self.triggered,
        }

    def format(self, pointer: str, value: object, is_last: bool) -> str:
        """The Lark term for the format `value`, which is at `pointer`.

        `is_last`: the answer ends with this format, so it may be free text.
        """
        if not isinstance(value, dict):
            raise refusal(self._origin, pointer, "a format is an object")
        maker = self._makers.get(str(value.get("type")))
        if maker is None:
            raise refusal(
                self._origin,
                pointer,
                f"type {str(value.get('type'))[:100]!r} is not supported; those that are: "
                f"{', '.join(sorted(self._makers))}",
            )
        self._depth += 1
        self._num_formats += 1
        if self._num_formats > MAX_TAGS:
            raise refusal(self._origin, pointer, f"there are more than {MAX_TAGS} formats")
        if self._depth > MAX_NESTING:
            raise refusal(self._origin, pointer, f"formats nest deeper than {MAX_NESTING}")
        term = maker(pointer, value, is_last)
        self._depth -= 1
        return term

    def _rule(self, body: str, options: str = "") -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{options}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        name = f"T{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def _const_string(self, pointer: str, value: dict[str, Any], is_last: bool) -> str:
        self._fields.check_names(pointer, value, ("value",))
        return literal(self._fields.text(pointer, value, "value"))

    def _regex(self, pointer: str, value: dict[str, Any], is_last: bool) -> str:
        self._fields.check_names(pointer, value, ("pattern", "excludes"))
        pattern = self._fields.text(pointer, value, "pattern")
        if len(pattern) > MAX_EXPRESSION_CHARACTERS:
            raise refusal(
                self._origin,
                pointer,
                f"pattern may have up to {MAX_EXPRESSION_CHARACTERS} characters",
            )
        return self._rule(
            self._terminal(
                expression(pattern) + _excluding(self._fields.texts(pointer, value, "excludes"))
            )
        )

    def _json_schema(self, pointer: str, value: dict[str, Any], is_last: bool) -> str:
        self._fields.check_names(pointer, value, ("json_schema", "style"))
        if value.get("style", "json") != "json":
            raise refusal(self._origin, pointer, "style is supported only as 'json'")
        if "json_schema" not in value:
            raise refusal(self._origin, pointer, "json_schema is missing")
        try:
            return json_term(value["json_schema"], at(pointer, "json_schema"), self._style)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{self._origin}: {error}", self._origin) from error

    def _any_text(self, pointer: str, value: dict[str, Any], is_last: bool) -> str:
        self._fields.check_names(pointer, value, ("excludes",))
        if not is_last:
            raise refusal(
                self._origin,
                pointer,
                "any_text is supported only at the end of the answer, or as the whole content of a"
                " tag that has an end",
            )
        return self._rule(
            self._terminal(_text_without(self._fields.texts(pointer, value, "excludes")))
        )

    def _token(self, pointer: str, value: dict[str, Any], is_last: bool) -> str:
        self._fields.check_names(pointer, value, ("token",))
        token = value.get("token")
        if isinstance(token, int) and not isinstance(token, bool) and token >= 0:
            return f"<[{token}]>"
        if isinstance(token, str) and _TOKEN_NAME.fullmatch(token) and token[1] != "[":
            return token
        raise refusal(
            self._origin, pointer, "token must be an id, or the name of a special token: <...>"
        )

    def _sequence(self, pointer: str, value: dict[str, Any], is_last: bool) -> str:
        self._fields.check_names(pointer, value, ("elements",))
        elements = self._fields.objects(pointer, value, "elements")
        terms = [
            self.format(at(pointer, "elements", i), part, is_last and i == len(elements) - 1)
            for i, part in enumerate(elements)
        ]
        return self._rule(" ".join(terms))

    def _alternatives(self, pointer: str, value: dict[str, Any], is_last: bool) -> str:
        self._fields.check_names(pointer, value, ("elements",))
        elements = self._fields.objects(pointer, value, "elements")
        terms = [
            self.format(at(pointer, "elements", i), part, is_last)
            for i, part in enumerate(elements)
        ]
        return self._rule(" | ".join(terms))

    def _repeated(self, pointer: str, value: dict[str, Any], is_last: bool) -> str:
        kind = value["type"]
        self._fields.check_names(
            pointer, value, ("content", *(("min", "max") if kind == "repeat" else ()))
        )
        is_once = kind == "optional"
        content = self.format(at(pointer, "content"), value.get("content"), is_last and is_once)
        if kind != "repeat":
            return self._rule(f"({content}){dict(optional='?', plus='+', star='*')[kind]}")
        least, most = (value.get(name) for name in ("min", "max"))
        for count in (least, most):
            if type(count) is not int or not 0 <= count <= _MAX_REPETITIONS:
                raise refusal(
                    self._origin, pointer, f"min and max must be from 0 to {_MAX_REPETITIONS}"
                )
        return self._rule(f"({content}){{{least},{most}}}")

    def _tag(self, pointer: str, value: dict[str, Any], is_last: bool) -> str:
        begin = self._fields.text(pointer, value, "begin")
        return self._rule(
            " ".join([literal(begin), self._content_and_end(pointer, value, is_last)])
        )

    def _content_and_end(self, pointer: str, value: dict[str, Any], is_last: bool) -> str:
        """The term for a tag after its begin text: the content and the end text."""
        self._fields.check_names(pointer, value, ("begin", "content", "end", "schema"))
        ends = self._fields.texts(pointer, value, "end")
        content = value.get("content")
        below = at(pointer, "content")
        if not ends or "" in ends:
            return self.format(below, content, is_last)
        end = " | ".join(map(literal, ends))
        if isinstance(content, dict) and content.get("type") == "any_text":
            self._fields.check_names(below, content, ("excludes",))
            inside = _text_without(self._fields.texts(below, content, "excludes"))
            # Lazy, because whoever parses the answer takes the first end text as the end.
            return self._rule(self._terminal(f"{self._terminal(inside)} ({end})"), "[lazy]")
        return f"{self.format(below, content, False)} ({end})"

    def triggered(self, pointer: str, value: dict[str, Any], is_last: bool) -> str:
        """The term for free text in which every trigger must begin one of the tags."""
        # First, check the fields.
        self._fields.check_names(
            pointer,
            value,
            ("triggers", "tags", "at_least_one", "stop_after_first", "excludes"),
        )
        if not is_last:
            raise refusal(
                self._origin,
                pointer,
                "tags in free text are supported only at the end of the answer",
            )
        triggers = self._fields.texts(pointer, value, "triggers")
        if not triggers or "" in triggers:
            raise refusal(self._origin, pointer, "triggers must be a list of texts, not empty ones")
        # Second, make a rule for each tag after its begin text.
        excludes = self._fields.texts(pointer, value, "excludes")
        by_trigger: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        whole = []
        for index, tag in enumerate(self._fields.objects(pointer, value, "tags")):
            below = at(pointer, "tags", index)
            begin = self._fields.text(below, tag, "begin")
            fitting = [trigger for trigger in by_trigger if begin.startswith(trigger)]
            if len(fitting) != 1:
                raise refusal(
                    self._origin, below, "begin must start with exactly one of the triggers"
                )
            rest = self._rule(self._content_and_end(below, tag, False))
            by_trigger[fitting[0]].append(f"{literal(begin[len(fitting[0]) :])} {rest}")
            whole.append(f"{literal(begin)} {rest}")
        # Last, join tags and free text.
        in_text = [
            f"{self._text_before(trigger, triggers, excludes)} ({' | '.join(rests)})"
            for trigger, rests in by_trigger.items()
            if rests
        ]
        tag_in_text, tag_first = self._rule(" | ".join(in_text)), self._rule(" | ".join(whole))
        text = self._rule(self._terminal(_text_without([*triggers, *excludes])))
        return self._rule(_arranged(value, tag_in_text, tag_first, text))

    def _text_before(self, trigger: str, triggers: Sequence[str], excludes: Sequence[str]) -> str:
        """The term for text up to and including `trigger`. It is lazy, so that the text ends at the
        first trigger."""
        before = self._terminal(_text_without([*triggers, *excludes]))
        return self._rule(self._terminal(f"{before} {literal(trigger)}"), "[lazy]")

    def _tags_with_separator(self, pointer: str, value: dict[str, Any], is_last: bool) -> str:
        self._fields.check_names(
            pointer, value, ("tags", "separator", "at_least_one", "stop_after_first")
        )
        tags = [
            self._tag(at(pointer, "tags", i), tag, False)
            for i, tag in enumerate(self._fields.objects(pointer, value, "tags"))
        ]
        tag = self._rule(" | ".join(tags))
        separator = literal(self._fields.text(pointer, value, "separator"))
        some = tag if value.get("stop_after_first") else f"{tag} ({separator} {tag})*"
        return self._rule(some if value.get("at_least_one") else f"({some})?")


def _text_without(texts: Sequence[str]) -> str:
    """The body of a terminal for any text that contains none of `texts`."""
    return _ANYTHING + _excluding(texts)


def _excluding(texts: Sequence[str]) -> str:
    if not texts:
        return ""
    return f" & ~(/(?s:.*)/ ({' | '.join(map(literal, texts))}) /(?s:.*)/)"


def _arranged(value: dict[str, Any], tag_in_text: str, tag_first: str, text: str) -> str:
    """The rule body for tags and free text. With at_least_one, the answer begins with a tag; with
    stop_after_first, it has at most one tag."""
    is_required, is_once = bool(value.get("at_least_one")), bool(value.get("stop_after_first"))
    if is_required:
        return tag_first if is_once else f"{tag_first} {tag_in_text}* {text}"
    return f"{tag_in_text} | {text}" if is_once else f"{tag_in_text}* {text}"
