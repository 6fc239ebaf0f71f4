"""Required forms of answers (structured output, tool calls) as data for the grammar process.

`server` creates the form of each call and asks for its grammar, which `process.grammar_main` makes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from quire.core.structured_outputs import KINDS, StructuredOutputsParams
from quire.errors import InvalidRequestError
from quire.text.grammars.grammar_text import grammar_of
from quire.text.grammars.schemas.reader import check_extent
from quire.text.parsers.dialect import Dialect
from quire.text.parsers.tool_use import Tool, ToolMode, ToolUse
from quire.text.tokenizer import Tokenizer

_FIELDS = tuple(each.name for each in fields(StructuredOutputsParams))


class GrammarForm(Protocol):
    """The required form of an answer; implemented by the classes below."""

    @property
    def origin(self) -> str:
        """The field of the request that the form comes from, for messages."""
        ...

    def as_plain(self) -> dict[str, Any]:
        """The form as data for JSON."""
        ...

    def grammar(self, dialect: Dialect, tokenizer: Tokenizer) -> str | None:
        """The grammar for `GrammarCompiler`; None if any text is allowed.

        Raises InvalidRequestError, which names the unsupported part.
        """
        ...


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """The whole answer must match `params`."""

    params: StructuredOutputsParams

    @property
    def origin(self) -> str:
        kind = next(name for name in KINDS if getattr(self.params, name) not in (None, False))
        return f"structured_outputs.{kind}"

    def as_plain(self) -> dict[str, Any]:
        check_extent(getattr(self.params, self.origin.rpartition(".")[2]), self.origin)
        return {"answer": _plain_params(self.params)}

    def grammar(self, dialect: Dialect, tokenizer: Tokenizer) -> str | None:
        return grammar_of(self.params)


@dataclass(frozen=True, slots=True)
class WholeMessage:
    """The answer is a message in the model's dialect; see `Dialect.grammar`."""

    tool_use: ToolUse
    answer_format: StructuredOutputsParams | None = None
    reasoning_budget: int | None = None
    prompt_end: str = ""

    @property
    def origin(self) -> str:
        return "tools" if self.tool_use.callable_tools else "response_format"

    @property
    def is_free(self) -> bool:
        """Whether any text is allowed, in all dialects."""
        return (
            self.answer_format is None
            and self.reasoning_budget is None
            and not self.tool_use.callable_tools
        )

    def as_plain(self) -> dict[str, Any]:
        use = self.tool_use
        return {
            "tools": [[each.name, each.parameters, each.is_strict] for each in use.tools],
            "mode": use.mode.value,
            "callable_names": None if use.callable_names is None else sorted(use.callable_names),
            "is_parallel": use.is_parallel,
            "format": None if self.answer_format is None else _plain_params(self.answer_format),
            "reasoning_budget": self.reasoning_budget,
            "prompt_end": self.prompt_end,
        }

    def grammar(self, dialect: Dialect, tokenizer: Tokenizer) -> str | None:
        return dialect.grammar(
            self.tool_use, self.answer_format, self.reasoning_budget, self.prompt_end, tokenizer
        )


def as_text(form: GrammarForm) -> str:
    """A form as JSON text; equal forms have equal texts. Raises InvalidRequestError."""
    try:
        return json.dumps(form.as_plain())
    except InvalidRequestError:  # a subclass of ValueError that already has the right message
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"{form.origin} is not valid JSON: {error}", form.origin
        ) from error


def form_of(text: str) -> GrammarForm:
    """The form that `as_text` has written."""
    plain = json.loads(text)
    if "answer" in plain:
        return WholeAnswer(StructuredOutputsParams(**plain["answer"]))
    names = plain["callable_names"]
    tools = tuple(
        Tool(name, None, parameters, is_strict) for name, parameters, is_strict in plain["tools"]
    )
    return WholeMessage(
        ToolUse(
            tools,
            ToolMode(plain["mode"]),
            None if names is None else frozenset(names),
            plain["is_parallel"],
        ),
        None if plain["format"] is None else StructuredOutputsParams(**plain["format"]),
        plain["reasoning_budget"],
        plain["prompt_end"],
    )


def _plain_params(params: StructuredOutputsParams) -> dict[str, Any]:
    found = {name: getattr(params, name) for name in _FIELDS}
    return {
        name: dict(value) if isinstance(value, Mapping) else value
        for name, value in found.items()
        if value not in (None, False)
    }
