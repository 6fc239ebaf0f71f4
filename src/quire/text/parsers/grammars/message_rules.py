"""Writes grammars of whole messages: reasoning, then calls, text, or a formatted answer.

Invariant: the parser of the same dialect can parse every message that a grammar allows, and the
arguments of calls obey their schemas. A term is an expression in the body of a grammar rule. Called
by `Dialect.grammar`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import InvalidRequestError
from quire.text.grammars.grammar_text import grammar_of
from quire.text.parsers.call_forms import (
    AnswerMarks,
    AnyCallForm,
    ChannelForm,
    JsonForm,
    PythonForm,
    Reasoning,
)
from quire.text.parsers.grammars.call_rules import CalledTool, call_term, json_arguments
from quire.text.parsers.grammars.remembered_terms import SPACED_STYLE
from quire.text.parsers.grammars.rules import Rules
from quire.text.parsers.tool_use import ToolMode, ToolUse


@dataclass(frozen=True, slots=True)
class Wanted:
    """The constraints on a message."""

    #: The tools that may be called; if empty, the message has no calls.
    tools: tuple[CalledTool, ...]
    mode: ToolMode
    is_parallel: bool
    answer_format: StructuredOutputsParams | None
    reasoning_budget: int | None
    #: True if the prompt begins the reasoning, False if it also ends it, None if it does neither.
    has_begun_reasoning: bool | None

    @property
    def has_strict_tool(self) -> bool:
        """True if a tool is strict: calls must obey its schema in every mode."""
        return any(called.tool.is_strict for called in self.tools)


def wanted_of(
    tool_use: ToolUse,
    answer_format: StructuredOutputsParams | None,
    reasoning_budget: int | None,
    has_begun_reasoning: bool | None,
) -> Wanted:
    """The constraints of a request. If the request names one required tool, it is called exactly
    once."""
    callable_tools = tool_use.callable_tools
    called = tuple(
        CalledTool(tool, f"tools[{at}].function.parameters", not tool.is_strict)
        for at, tool in enumerate(tool_use.tools)
        if tool in callable_tools
    )
    names = tool_use.callable_names
    is_named = tool_use.mode is ToolMode.REQUIRED and names is not None and len(names) == 1
    return Wanted(
        called,
        tool_use.mode,
        tool_use.is_parallel and not is_named,
        answer_format,
        reasoning_budget,
        has_begun_reasoning,
    )


class PlainRules:
    """The grammar of a message with reasoning between marks, followed by text and calls."""

    def __init__(
        self,
        rules: Rules,
        reasoning: Reasoning | None,
        forms: Sequence[AnyCallForm],
        marks: AnswerMarks | None = None,
    ) -> None:
        """`marks` are the marks around the answer's text."""
        self._rules = rules
        self._tokens = rules.tokens
        self._reasoning = reasoning
        self._forms = forms
        self._marks = marks

    def grammar(self, wanted: Wanted) -> str | None:
        """The grammar; None if any message is allowed."""
        answer = self._answer(wanted)
        if answer is None and wanted.reasoning_budget is None:
            return None
        thoughts = self._reasoning_term(wanted)
        if answer is None and not thoughts:
            return None
        return self._rules.write(f"{thoughts} {answer or self._between_marks(None)}")

    def _answer(self, wanted: Wanted) -> str | None:
        """The term for the message after the reasoning; None if it may be any text."""
        form = answer_term(self._rules, wanted.answer_format)
        if form is not None:
            form = self._between_marks(form)
        if not wanted.tools:
            return form
        if wanted.mode is ToolMode.REQUIRED:
            return self._calls(wanted)
        if self._marks is not None:
            form = form or self._between_marks(None)
        if form is not None:
            return f"({self._calls(wanted)} | {form})"
        if all(each.marker for each in self._forms):
            return self._text_with_calls(wanted)
        return self._text_or_calls(wanted) if wanted.has_strict_tool else None

    def _between_marks(self, text: str | None) -> str:
        """The term for the answer's text with the marks around it, if the dialect has them. If
        `text` is None, any text is allowed."""
        marks = self._marks
        if marks is None:
            return text or self._rules.text_without(())
        begin = self._terms(marks.begin)
        if text is None:
            return f"{begin} {self._rules.text_before(marks.end)}"
        return f"{begin} {text} {self._terms(marks.end)}"

    def _calls(self, wanted: Wanted) -> str:
        """The term for one or several calls with their marks."""
        form = self._forms[0]
        begin = self._terms(form.begin)
        section = self._rules.add("calls", f"{begin} {self._section(form, wanted)}")
        if form.is_repeated or not wanted.is_parallel:
            return section
        return f"{section} ({self._terms(form.separator)} {section})*"

    def _section(self, form: AnyCallForm, wanted: Wanted) -> str:
        """The term for calls: from after the mark `begin` up to and including the mark `end`."""
        calls = [call_term(self._rules, form, called) for called in wanted.tools]
        call = self._rules.add(
            "call",
            f"{self._terms(form.call_begin)} {self._rules.any_of(calls)}"
            f" {self._terms(form.call_end)}",
        )
        is_list = isinstance(form, (JsonForm, PythonForm)) and form.is_list
        if form.is_repeated and wanted.is_parallel:
            separator = form.item_separator if is_list else form.separator
            call = f"{call} ({self._terms(separator)} {call})*"
        if is_list:
            call = f'"[" {call} "]"'
        return f"{call} {self._terms(form.end)}"

    def _text_with_calls(self, wanted: Wanted) -> str:
        """The term for text with calls: every mark of a call must be followed by a call."""
        form = self._forms[0]
        others = [each.marker for each in self._forms[1:] if each.marker != form.marker]
        opened = form.begin or form.call_begin
        before = self._rules.text_before(form.marker, others)
        rest = self._terms(opened[opened.index(form.marker) + len(form.marker) :])
        if not form.begin:
            form = msgspec.structs.replace(form, call_begin="")
        section = self._rules.add("calls", f"{before} {rest} {self._section(form, wanted)}")
        text = self._rules.text_without([form.marker, *others])
        return f"{section}{'*' if wanted.is_parallel else '?'} {text}"

    def _text_or_calls(self, wanted: Wanted) -> str:
        """The term for calls without a mark, or else text that does not begin like a call."""
        marks = [each.marker for each in self._forms if each.marker]
        start = r"/[^ \t\r\n{\[](?s:.*)/"
        text = self._rules.add("TEXT", f"{start} & {self._rules.without(marks)}")
        return f"({self._calls(wanted)} | {text})?"

    def _reasoning_term(self, wanted: Wanted) -> str:
        """The term for the reasoning and its end mark; "" if no reasoning is allowed.

        Unless the prompt has begun it, the reasoning needs a begin mark that is an added token of
        the model.
        """
        reasoning, budget = self._reasoning, wanted.reasoning_budget
        if reasoning is None or wanted.has_begun_reasoning is False:
            return ""
        begin, end = reasoning.begin[0], reasoning.end[0]
        if wanted.has_begun_reasoning:
            return self._text_until(end, budget)
        if begin.split()[0] not in self._tokens.ids or budget == 0:
            return ""
        return f"({self._terms(begin)} {self._text_until(end, budget)})?"

    def _text_until(self, end: str, budget: int | None) -> str:
        """The term for any text up to and including the reasoning's end mark, and white space after
        it."""
        assert self._reasoning is not None
        others = [*self._reasoning.end[1:]]
        if self._reasoning.is_ended_by_calls:
            others += [form.marker for form in self._forms if form.marker]
        if budget is None:
            found = self._rules.text_before(end, others)
        else:
            found = limited_text(self._rules, end, budget, others)
        return f"{found} /[ \\n]{{0,2}}/"

    def _terms(self, mark: str) -> str:
        return self._tokens.terms(mark) if mark else ""


def limited_text(rules: Rules, end: str, budget: int, others: Sequence[str] = ()) -> str:
    """A term for at most `budget` tokens of any text except `others`, followed by the mark `end`.

    Raises InvalidRequestError if `end` is not a token, because the budget could not be enforced.
    """
    token_id = rules.tokens.ids.get(end)
    if token_id is None:
        raise InvalidRequestError(
            f"this model ends its reasoning with {end!r}, which is not a single token, so a"
            " budget for reasoning can't be enforced; leave it out",
            "thinking_token_budget",
        )
    excluded = {
        token_id,
        *(rules.tokens.ids[other] for other in others if other in rules.tokens.ids),
    }
    any_token = rules.tokens.all_but(excluded)
    thoughts = f"{any_token}{{0,{budget}}}" if budget else ""
    return f"{thoughts} <[{token_id}]>"


def answer_term(rules: Rules, answer_format: StructuredOutputsParams | None) -> str | None:
    """The term for an answer in the given format; None if any text is allowed."""
    if answer_format is None:
        return None
    grammar = grammar_of(answer_format)
    return rules.add("answer", f"%lark {{\n{grammar}\n}}")


class ChannelRules:
    """The grammar of an answer in the harmony format, which consists of several messages."""

    def __init__(self, rules: Rules, form: ChannelForm, already_written: str) -> None:
        """`already_written` is the prompt's text after the role of the first message."""
        self._rules = rules
        self._form = form
        self._written = already_written
        self._marks = (*form.ends, form.start, form.channel)

    def grammar(self, wanted: Wanted) -> str | None:
        """The grammar; None if any message is allowed."""
        answer = answer_term(self._rules, wanted.answer_format)
        if answer is None and not wanted.tools and wanted.reasoning_budget is None:
            return None
        form = self._form
        if not self._rules.tokens.is_special(form.channel):
            raise InvalidRequestError(
                f"this model's tokenizer has no special token {form.channel}, without which no"
                " constraint on its messages can be enforced",
                "messages",
            )
        header, mark, _ = self._written.rpartition(form.message)
        if not mark:
            return self._rules.write(self._message(wanted, answer))
        if header.endswith(form.channel + form.reasoning_channel):
            body = self._body(wanted.reasoning_budget)
            return self._rules.write(f"{body} {self._message(wanted, answer)}")
        return self._rules.write(answer or self._rules.text_without(self._marks))

    def _message(self, wanted: Wanted, answer: str | None) -> str:
        """The term for any reasoning messages, and then a call or the answer."""
        form, rules = self._form, self._rules
        budget = wanted.reasoning_budget
        ends = []
        if wanted.tools:
            ends.append(rules.any_of(self._call(called) for called in wanted.tools))
        if not wanted.tools or wanted.mode is not ToolMode.REQUIRED:
            body = answer or rules.text_without(self._marks)
            ends.append(f"{self._header(form.answer_channel)} {body}")
        thought = f"{self._header(form.reasoning_channel)} {self._body(budget)}"
        if budget is not None:
            before = f"({thought})?" if budget else ""
        elif wanted.mode is ToolMode.REQUIRED or answer is not None:
            before = f"({thought})*"
        else:  # the model may write a message about its next call
            before = f"({thought} | {self._header(form.call_channel)} {self._body(None)})*"
        return f"{before} {rules.any_of(ends)}"

    def _header(self, channel: str) -> str:
        return self._rules.tokens.terms(self._form.channel + channel + self._form.message)

    def _body(self, budget: int | None) -> str:
        """The term for a body, its end mark, and the beginning of the next message up to its
        role."""
        form, rules = self._form, self._rules
        end = form.ends[0]
        others = [mark for mark in self._marks if mark != end]
        if budget is None:
            found = rules.text_before(end, others)
        else:
            found = limited_text(rules, end, budget)
        return f"{found} {rules.tokens.terms(form.start + form.role)}"

    def _call(self, called: CalledTool) -> str:
        form = self._form
        header = (
            f"{form.channel}{form.call_channel} {form.recipient}{form.call_prefix}"
            f"{called.tool.name} {form.constrain}json{form.message}"
        )
        return f"{self._rules.tokens.terms(header)} {json_arguments(called, SPACED_STYLE)}"
