"""Cuts a text's tokens into windows, and says which tokens of each count.

A model reads each window by itself. A token counts where at least half a window precedes it, as in
llama.cpp's perplexity tool: what the first tokens of a window cost says more of their missing
context than of the model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

DEFAULT_WINDOW_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that are read together, as one prompt."""

    token_ids: tuple[int, ...]

    #: Index of the first token that counts; all tokens behind it count as well.
    first: int

    @property
    def num_counted(self) -> int:
        """Tokens whose prediction is measured."""
        return len(self.token_ids) - self.first

    @property
    def predicting(self) -> slice:
        """The positions whose output predicts the tokens that count."""
        return slice(self.first - 1, len(self.token_ids) - 1)


def cut(
    token_ids: Sequence[int], window_tokens: int, prefix: Sequence[int] = ()
) -> Iterator[Window]:
    """The windows of a text, one after the other; of the last one, as many tokens as there are. One
    in which no token counts is left out.

    window_tokens: of each, its prefix included. prefix: tokens that the tokenizer puts before a
    text, which each window begins with.
    """
    length = window_tokens - len(prefix)
    assert length > 0, (window_tokens, prefix)
    # A text that is shorter than a window is one, of its own length.
    first = max(1, len(prefix), min(window_tokens, len(token_ids) + len(prefix)) // 2)
    for start in range(0, len(token_ids), length):
        window = Window((*prefix, *token_ids[start : start + length]), first)
        if window.num_counted > 0:
            yield window
