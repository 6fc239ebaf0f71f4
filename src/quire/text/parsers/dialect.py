"""What a model writes around reasoning and tool calls, and the parser of its messages.

A dialect is data (`dialects/*.toml`). `dialect_choice` finds the one of a model.
"""

import secrets
import string
from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

from quire.core.structured_outputs import StructuredOutputsParams
from quire.text.grammars.forcing import with_forced_tokens
from quire.text.grammars.origin import with_origin
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
    """The parser of one message. It holds back no more than may turn out to be a mark.

    Law: the events of a text, adjacent pieces of one kind joined, do not depend on how it was cut
    into pieces. What is no call and no mark comes out as text (or reasoning, where it stood in
    that), character by character, white space beside marks aside.
    """

    __slots__ = ("_cut_character", "_is_ended", "_reader", "_source", "_writer")

    def __init__(self, layout: Layout, already_written: str = "") -> None:
        """already_written: what the prompt has of the message; it makes no events."""
        self._source = TextSource()
        self._writer = EventWriter()
        self._reader = layout(self._source, self._writer)
        self._is_ended = False
        self._cut_character = ""  # what was pushed last, if it may stand for a cut character
        next(self._reader)
        if already_written:
            self.push(already_written)

    def push(self, text: str) -> list[MessageEvent]:
        """The events of more text."""
        assert not self._is_ended, "text was pushed behind the end"
        if text:
            text = self._cut_character + text
            self._cut_character = CUT_CHARACTER if text[-1] == CUT_CHARACTER else ""
            if text := text.removesuffix(CUT_CHARACTER):
                self._source.push(text)
                next(self._reader)
        return self._writer.take()

    def finish(self) -> list[MessageEvent]:
        """The events of what was held back; the message ends here."""
        assert not self._is_ended, "a message ends once"
        self._source.push(self._cut_character)
        self._is_ended = self._source.is_ended = True
        next(self._reader, None)
        return self._writer.take()


class Dialect(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one family of models writes reasoning and calls.

    aliases: further names, as other engines' flags spell them: of its calls, or of its reasoning.
    template_words: a chat template that has all words of one of these lists speaks the dialect.
    reasoning: None: it writes none. answer: None: text stands between no marks.
    calls: the forms of calls that are read; grammars write the first.
    channels: in place of all three, for messages made of messages.
    special_tokens: those that the parser must see in the text, if the tokenizer has them.
    call_ids: "short" ones have nine letters and digits, which Mistral's templates ask for.
    """

    name: str
    aliases: tuple[str, ...] = ()
    reasoning_aliases: tuple[str, ...] = ()
    template_words: tuple[tuple[str, ...], ...] = ()
    reasoning: Reasoning | None = None
    answer: AnswerMarks | None = None
    calls: tuple[AnyCallForm, ...] = ()
    channels: ChannelForm | None = None
    special_tokens: frozenset[str] = frozenset()
    call_ids: Literal["long", "short"] = "long"

    @property
    def kept_special_tokens(self) -> frozenset[str]:
        """Special tokens that must stay in the text for the parser, whoever else skips them."""
        return self.special_tokens

    def tokens_kept_for(self, tool_use: ToolUse) -> frozenset[str]:
        """Those of `kept_special_tokens` that matter to one message: where nothing may be called,
        marks of calls would be text."""
        if self.channels is not None or tool_use.callable_tools:
            return self.special_tokens
        marks = self.reasoning.begin + self.reasoning.end if self.reasoning is not None else ()
        marks += (self.answer.begin, self.answer.end) if self.answer is not None else ()
        return frozenset(
            token for token in self.special_tokens if any(token in mark for mark in marks)
        )

    @property
    def has_reasoning(self) -> bool:
        """Whether models that speak it may reason before they answer."""
        return self.reasoning is not None or self.channels is not None

    def new_call_id(self) -> str:
        """An id for a call, in the form that the model's template takes back."""
        if self.call_ids == "short":
            drawn = (secrets.choice(_SHORT_ID_CHARACTERS) for _ in range(_NUM_SHORT_ID_CHARACTERS))
            return "".join(drawn)
        return f"call_{secrets.token_hex(12)}"

    def parser(
        self, tool_use: ToolUse, prompt_end: str, *, has_answer_format: bool = False
    ) -> MessageParser:
        """A parser of one message.

        prompt_end: what the chat template put behind the last message: it tells whether the
            prompt already began, or ended, the reasoning. "": nothing.
        has_answer_format: whether `grammar` was given a form of the text.
        Calls are read only where tools may be called; else they are text.
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
        """The grammar of one message, as `text.grammars` compiles it; None: anything goes.

        What it allows, `parser` reads. Calls obey their tools' schemas, those of tools that are
        not strict as far as that can be enforced. Where only their place announces calls, free
        text and calls are told apart by a grammar only if a tool is strict.

        answer_format: what the text obeys, where no tool is called.
        reasoning_budget: after so many tokens the reasoning is ended.
        tokenizer: the model's, to know which marks are tokens.
        Raises InvalidRequestError.
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
        """Whether the prompt has begun the reasoning; None: it has not even ended it."""
        if not written or self.reasoning is None:
            return None
        return not any(end in written for end in self.reasoning.end)

    def _already_written(self, prompt_end: str) -> str:
        """The part of the message that stands in the prompt."""
        if self.channels is not None:
            _, mark, rest = prompt_end.rpartition(self.channels.start + self.channels.role)
            return rest if mark else ""
        begins = self.reasoning.begin if self.reasoning is not None else ()
        begin = max((prompt_end.rfind(mark) for mark in begins), default=-1)
        return prompt_end[begin:] if begin >= 0 else ""
