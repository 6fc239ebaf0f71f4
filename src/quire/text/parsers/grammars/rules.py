"""Collects the rules of a grammar, and writes marks such as `<tool_call>` as grammar terms.

The grammar is in llguidance's variant of Lark, for `text.grammars`. A term is an expression in the
body of a rule.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from quire.text.grammars.lark import literal
from quire.text.tokenizer import Tokenizer

ANY_TEXT = "/(?s:.*)/"


@dataclass(frozen=True, slots=True)
class MarkTokens:
    """The added tokens of a model, to write marks. In a grammar, a special token is not text: it
    must be written by its id."""

    #: Ids of added tokens by text.
    ids: dict[str, int] = field(default_factory=dict)
    #: Ids of special tokens.
    special: frozenset[int] = frozenset()
    vocab_size: int = 0

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> "MarkTokens":
        """The added tokens of a tokenizer; empty if it is None, so that all marks are text."""
        if tokenizer is None:
            return cls()
        return cls(dict(tokenizer.added_tokens), tokenizer.special_token_ids, tokenizer.vocab_size)

    def is_special(self, mark: str) -> bool:
        """True if the mark is one special token."""
        return self.ids.get(mark) in self.special

    def terms(self, mark: str) -> str:
        """The mark as a sequence of grammar terms: special tokens by id, and other text as
        literals."""
        special = [text for text in self.ids if self.is_special(text) and text in mark]
        if not special:
            return literal(mark)
        special.sort(key=len, reverse=True)
        parts = re.split("(" + "|".join(map(re.escape, special)) + ")", mark)
        return " ".join(
            f"<[{self.ids[part]}]>" if part in special else literal(part) for part in parts if part
        )

    def all_but(self, token_ids: Iterable[int]) -> str:
        """A term for any token that is not special and not in `token_ids`."""
        excluded = sorted({*token_ids, *self.special, self.vocab_size})
        ranges, begin = [], 0
        for each in excluded:
            if begin < each <= self.vocab_size:
                ranges.append(f"{begin}-{each - 1}")
            begin = max(begin, each + 1)
        return f"<[{','.join(ranges)}]>"


class Rules:
    """The rules of a grammar that is being written. Each name is unique: a hint and a number."""

    def __init__(self, tokens: MarkTokens) -> None:
        self.tokens = tokens
        self._lines: list[str] = []
        self._num_names = 0

    def add(self, hint: str, body: str, attributes: str = "") -> str:
        """Add a rule and return its name. `attributes` are llguidance's rule attributes, such as
        `lazy`."""
        name = self.name(hint)
        self.define(name, body, attributes)
        return name

    def name(self, hint: str) -> str:
        """A new name, which has to be defined by `define`. With a hint in capitals, it names a
        terminal."""
        self._num_names += 1
        return f"{hint}_{self._num_names}"

    def define(self, name: str, body: str, attributes: str = "") -> None:
        """Add the rule `name` with this body."""
        self._lines.append(f"{name}{f'[{attributes}]' if attributes else ''}: {body}")

    def attempt(self, write: Callable[[], str]) -> str:
        """Call `write` and return its result. If it raises, the rules that it added are removed."""
        num_lines = len(self._lines)
        try:
            return write()
        except BaseException:
            del self._lines[num_lines:]
            raise

    def any_of(self, terms: Iterable[str]) -> str:
        """A term for any one of several terms."""
        return "(" + " | ".join(terms) + ")"

    def text_before(self, mark: str, others: Iterable[str] = ()) -> str:
        """A term for any text up to and including the first `mark`, without any of `others`."""
        if self.tokens.is_special(mark):
            return f"{self.text_without(others)} {self.tokens.terms(mark)}"
        text = self.add("TEXT", self.without(others))
        return self.add("before", f"{text} {literal(mark)}", "lazy")

    def text_without(self, marks: Iterable[str]) -> str:
        """A term for any text, possibly empty, that contains none of these marks."""
        return self.add("TEXT", self.without(marks))

    def without(self, marks: Iterable[str]) -> str:
        """The body of a terminal for any text that contains none of these marks."""
        texts = [mark for mark in marks if not self.tokens.is_special(mark)]
        parts = [ANY_TEXT, *(f"~/(?s:.*){_regex(mark)}(?s:.*)/" for mark in texts)]
        return " & ".join(parts)

    def write(self, start: str) -> str:
        """The text of the grammar, with `start` as the body of its start rule."""
        return "\n".join([f"start: {start}", *self._lines])


def _regex(text: str) -> str:
    """A regular expression that matches exactly `text`."""
    return "".join(
        character if character.isalnum() or ord(character) > 127 else f"\\x{ord(character):02x}"
        for character in text
    )
