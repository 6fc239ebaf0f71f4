"""A model's dialect (its format of reasoning and tool calls), and the parser of its messages.

Dialects are read from `dialects/*.toml`. `dialect_choice` finds the dialect of a model.
"""

import secrets
import string
from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

from quire.core.structured_outputs import StructuredOutputsParams
from quire.text.grammars.grammar_header import with_forced_tokens, with_origin
from quire.text.parsers.call_forms import AnswerMarks, AnyCallForm, ChannelForm, Reasoning
from quire.text.parsers.grammars.message_rules import ChannelRules, PlainRules, wanted_of
from quire.text.parsers.grammars.rules import MarkTokens, Rules
from quire.text.parsers.message_events import MessageEvent
from quire.text.parsers.reading.channel_layout import ChannelReader
from quire.text.parsers.reading.event_writer import EventWriter
from quire.text.parsers.reading.plain_layout import PlainReader
from quire.text.parsers.reading.text_limits import TextLimits
from quire.text.parsers.reading.text_source import CUT_CHARACTER, Reader, TextSource
from quire.text.parsers.tool_use import ToolMode, ToolUse
from quire.text.tokenizer import Tokenizer

_SHORT_ID_CHARACTERS = string.ascii_letters + string.digits
_NUM_SHORT_ID_CHARACTERS = 9

Layout: TypeAlias = Callable[[TextSource, EventWriter], Reader[None]]


class MessageParser:
    """The streaming parser of one message. It holds back only text that may be part of a mark, such
    as `<tool_call>`.

    Invariant: if adjacent pieces of one kind are joined, the events do not depend on how the text
    was split. Every character outside of calls and marks is part of an event, except for white
    space next to marks.
    """

    __slots__ = ("_cut_character", "_is_ended", "_reader", "_source", "_writer")

    def __init__(self, layout: Layout, already_written: str = "") -> None:
        """`already_written` is the message's beginning in the prompt; it creates no events."""
        self._source = TextSource()
        self._writer = EventWriter()
        self._reader = layout(self._source, self._writer)
        self._is_ended = False
        #: U+FFFD if the last piece ended with it, since it may stand for an incomplete character;
        #: else "".
        self._cut_character = ""
        next(self._reader)
        if already_written:
            self.push(already_written)

    def push(self, text: str) -> list[MessageEvent]:
        """Add text to the message; returns the new events."""
        assert not self._is_ended, "push() was called after finish()"
        if text:
            text = self._cut_character + text
            self._cut_character = CUT_CHARACTER if text[-1] == CUT_CHARACTER else ""
            if text := text.removesuffix(CUT_CHARACTER):
                self._source.push(text)
                next(self._reader)
        return self._writer.pop_events()

    def finish(self) -> list[MessageEvent]:
        """End the message; returns the events of the text that was held back."""
        assert not self._is_ended, "finish() was called twice"
        self._source.push(self._cut_character)
        self._is_ended = self._source.is_ended = True
        next(self._reader, None)
        return self._writer.pop_events()


class Dialect(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The format in which a family of models writes reasoning and calls."""

    name: str
    #: Further names for the format of calls, such as other engines use in their flags.
    aliases: tuple[str, ...] = ()
    #: Further names for the format of reasoning, such as other engines use in their flags.
    reasoning_aliases: tuple[str, ...] = ()
    #: Lists of words. A chat template that contains all words of one list has this dialect.
    template_words: tuple[tuple[str, ...], ...] = ()
    #: None if the models write no reasoning.
    reasoning: Reasoning | None = None
    #: None if the answer's text has no marks around it.
    answer: AnswerMarks | None = None
    #: The formats of calls that the parser accepts; grammars use the first format.
    calls: tuple[AnyCallForm, ...] = ()
    #: The harmony format, whose answers consist of several messages. If set, it replaces
    #: `reasoning`, `answer` and `calls`.
    channels: ChannelForm | None = None
    #: Special tokens that the detokenizer must keep in the text for the parser.
    special_tokens: frozenset[str] = frozenset()
    #: "short" ids have nine letters and digits, as Mistral's templates require.
    call_ids: Literal["long", "short"] = "long"

    def tokens_kept_for(self, tool_use: ToolUse) -> frozenset[str]:
        """The special tokens that the detokenizer must keep for one message. If no tool may be
        called, the marks of calls are not kept, since they would appear in the answer's text."""
        if self.channels is not None or tool_use.callable_tools:
            return self.special_tokens
        marks = self.reasoning.begin + self.reasoning.end if self.reasoning is not None else ()
        marks += (self.answer.begin, self.answer.end) if self.answer is not None else ()
        return frozenset(
            token for token in self.special_tokens if any(token in mark for mark in marks)
        )

    @property
    def has_reasoning(self) -> bool:
        """True if models of this dialect may reason before they answer."""
        return self.reasoning is not None or self.channels is not None

    def new_call_id(self) -> str:
        """A new call id, in the format that the model's template accepts."""
        if self.call_ids == "short":
            drawn = (secrets.choice(_SHORT_ID_CHARACTERS) for _ in range(_NUM_SHORT_ID_CHARACTERS))
            return "".join(drawn)
        return f"call_{secrets.token_hex(12)}"

    def parser(
        self, tool_use: ToolUse, prompt_end: str, *, has_answer_format: bool = False
    ) -> MessageParser:
        """A new parser for one message.

        `prompt_end` is the prompt's text after the last message; it shows whether the prompt begins
        or ends the reasoning. It may be "". `has_answer_format`: True if `grammar` was called with
        an answer_format. If no tool may be called, calls are treated as text.
        """
        tools = tool_use.callable_tools
        limits = TextLimits(
            is_allowed=not tools or tool_use.mode is not ToolMode.REQUIRED,
            differs_from_calls=not has_answer_format and any(tool.is_strict for tool in tools),
            special_tokens=tuple(self.special_tokens),
        )

        def layout(source: TextSource, writer: EventWriter) -> Reader[None]:
            if self.channels is not None:
                return ChannelReader(self.channels, tools, limits, source, writer).read()
            marks = (self.reasoning, self.calls, self.answer)
            return PlainReader(*marks, tools, limits, source, writer).read()

        return MessageParser(layout, self._already_written(prompt_end))

    def grammar(
        self,
        tool_use: ToolUse,
        answer_format: StructuredOutputsParams | None = None,
        reasoning_budget: int | None = None,
        prompt_end: str = "",
        tokenizer: Tokenizer | None = None,
    ) -> str | None:
        """The grammar of one message for `text.grammars`; None if any message is allowed.

        `parser` can parse all allowed messages. Calls obey their tools' schemas; if a tool is not
        strict, unsupported parts of its schema are ignored. If calls have no mark and a tool is
        strict, the grammar forbids text that begins like a call.

        `answer_format` is the format of the text of an answer without calls. `reasoning_budget` is
        the maximum number of reasoning tokens. `tokenizer` is the model's tokenizer; it determines
        which marks are special tokens. Raises InvalidRequestError.
        """
        if answer_format is None and reasoning_budget is None and not tool_use.callable_tools:
            return None
        rules = Rules(MarkTokens.of(tokenizer))
        written = self._already_written(prompt_end)
        wanted = wanted_of(tool_use, answer_format, reasoning_budget, self._has_begun(written))
        if self.channels is not None:
            grammar = ChannelRules(rules, self.channels, written).grammar(wanted)
        else:
            grammar = PlainRules(rules, self.reasoning, self.calls, self.answer).grammar(wanted)
        if grammar is None or not wanted.tools:
            return None if grammar is None else with_origin(grammar, "response_format")
        return with_origin(with_forced_tokens(grammar), "tools")

    def _has_begun(self, written: str) -> bool | None:
        """True if the prompt begins the reasoning, False if it also ends it, None if it does
        neither."""
        if not written or self.reasoning is None:
            return None
        return not any(end in written for end in self.reasoning.end)

    def _already_written(self, prompt_end: str) -> str:
        """The beginning of the message that the prompt already contains."""
        if self.channels is not None:
            _, mark, rest = prompt_end.rpartition(self.channels.start + self.channels.role)
            return rest if mark else ""
        begins = self.reasoning.begin if self.reasoning is not None else ()
        begin = max((prompt_end.rfind(mark) for mark in begins), default=-1)
        return prompt_end[begin:] if begin >= 0 else ""
