"""Cuts a text's tokens into windows, and selects the tokens of each window that count.

A model reads each window without the text before it. A token counts if at least half a window
precedes it, as in llama.cpp's perplexity tool, since a window's first tokens are hard to predict
mainly because they lack context.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

DEFAULT_WINDOW_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Window:
    """A sequence of tokens that a model reads as one prompt."""

    token_ids: tuple[int, ...]

    #: Index of the first token that counts; all later tokens count as well.
    first: int

    @property
    def num_counted(self) -> int:
        """The number of tokens whose prediction is measured."""
        return len(self.token_ids) - self.first

    @property
    def predicting(self) -> slice:
        """The positions whose output predicts the tokens that count."""
        return slice(self.first - 1, len(self.token_ids) - 1)


def cut(
    token_ids: Sequence[int], window_tokens: int, prefix: Sequence[int] = ()
) -> Iterator[Window]:
    """Cut a text into windows. The last window may be shorter. Leaves out windows without counted
    tokens.

    `window_tokens` is the length of a window with its prefix. Each window begins with `prefix`, the
    tokens that the tokenizer puts before a text.
    """
    length = window_tokens - len(prefix)
    assert length > 0, (window_tokens, prefix)
    # A text that is shorter than a window is one window, of the text's length.
    first = max(1, len(prefix), min(window_tokens, len(token_ids) + len(prefix)) // 2)
    for start in range(0, len(token_ids), length):
        window = Window((*prefix, *token_ids[start : start + length]), first)
        if window.num_counted > 0:
            yield window
