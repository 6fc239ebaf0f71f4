"""Rules of a grammar while it is being written, and marks as terms of it.

The grammar is Lark in llguidance's dialect, as `text.grammars` compiles it. Knows nothing of calls.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from quire.text.grammars.lark import literal
from quire.text.tokenizer import Tokenizer

ANY_TEXT = "/(?s:.*)/"


@dataclass(frozen=True, slots=True)
class MarkTokens:
    """Which marks are tokens of a model. A special token is no text to a grammar.

    ids: of the tokens that stand for whole texts. special: ids of those that are special.
    """

    ids: dict[str, int] = field(default_factory=dict)
    special: frozenset[int] = frozenset()
    vocab_size: int = 0

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> "MarkTokens":
        """Those of a tokenizer; None: all marks are text."""
        if tokenizer is None:
            return cls()
        return cls(dict(tokenizer.added_tokens), tokenizer.special_token_ids, tokenizer.vocab_size)

    def is_special(self, mark: str) -> bool:
        """Whether the mark is one special token."""
        return self.ids.get(mark) in self.special

    def terms(self, mark: str) -> str:
        """The mark as a sequence of terms."""
        special = [text for text in self.ids if self.is_special(text) and text in mark]
        if not special:
            return literal(mark)
        special.sort(key=len, reverse=True)
        parts = re.split("(" + "|".join(map(re.escape, special)) + ")", mark)
        return " ".join(
            f"<[{self.ids[part]}]>" if part in special else literal(part) for part in parts if part
        )

    def all_but(self, token_ids: Iterable[int]) -> str:
        """A term for any token that is text, but these."""
        excluded = sorted({*token_ids, *self.special, self.vocab_size})
        ranges, begin = [], 0
        for each in excluded:
            if begin < each <= self.vocab_size:
                ranges.append(f"{begin}-{each - 1}")
            begin = max(begin, each + 1)
        return f"<[{','.join(ranges)}]>"


class Rules:
    """The rules so far. Names are drawn from hints and never clash."""

    def __init__(self, tokens: MarkTokens) -> None:
        self.tokens = tokens
        self._lines: list[str] = []
        self._num_names = 0

    def add(self, hint: str, body: str, attributes: str = "") -> str:
        """A further rule; returns its name. attributes: as `lazy`."""
        name = self.name(hint)
        self.define(name, body, attributes)
        return name

    def name(self, hint: str) -> str:
        """A name for a rule, or in capitals for a terminal, that `define` gives its body."""
        self._num_names += 1
        return f"{hint}_{self._num_names}"

    def define(self, name: str, body: str, attributes: str = "") -> None:
        """Give `name` its body."""
        self._lines.append(f"{name}{f'[{attributes}]' if attributes else ''}: {body}")

    def attempt(self, write: Callable[[], str]) -> str:
        """What `write` returns; if it raises, the rules are as they were before."""
        num_lines = len(self._lines)
        try:
            return write()
        except BaseException:
            del self._lines[num_lines:]
            raise

    def any_of(self, terms: Iterable[str]) -> str:
        """One of several terms."""
        return "(" + " | ".join(terms) + ")"

    def text_before(self, mark: str, others: Iterable[str] = ()) -> str:
        """Any text up to the first `mark`, which it includes; `others` are not in it."""
        if self.tokens.is_special(mark):
            return f"{self.text_without(others)} {self.tokens.terms(mark)}"
        text = self.add("TEXT", self.without(others))
        return self.add("before", f"{text} {literal(mark)}", "lazy")

    def text_without(self, marks: Iterable[str]) -> str:
        """Any text, also none, without these marks in it."""
        return self.add("TEXT", self.without(marks))

    def without(self, marks: Iterable[str]) -> str:
        """What a terminal is for any text without these marks in it."""
        texts = [mark for mark in marks if not self.tokens.is_special(mark)]
        parts = [ANY_TEXT, *(f"~/(?s:.*){_regex(mark)}(?s:.*)/" for mark in texts)]
        return " & ".join(parts)

    def write(self, start: str) -> str:
        """The grammar."""
        return "\n".join([f"start: {start}", *self._lines])


def _regex(text: str) -> str:
    """A regular expression for exactly `text`."""
    return "".join(
        character if character.isalnum() or ord(character) > 127 else f"\\x{ord(character):02x}"
        for character in text
    )
