"""Encodes special tokens that a client writes in chat messages as plain text.

A chat template joins the client's texts and the model's special tokens (`<|im_end|>`) to one text.
The tokenizer finds special tokens in that text, no matter whether the template or a client wrote
them. So, before the template runs, a marker is put into each special token in a client's text. A
marker is also put at an end of a text that could form a special token together with adjacent text.
The marker is a character that is in none of the texts. The rendered text is encoded without the
markers, and a special token with a marker inside is encoded as plain text. All other text gets
exactly the tokens that it has without markers.

Added tokens that are not special (`<think>`) count as ordinary text. Called by
`text.chat_template`.
"""

import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, normalizers

from quire.errors import InvalidRequestError

Span = tuple[int, int, int]
"""A token in a text: (id, position of its first character, position after its last character)."""

_PRIVATE_PLANE = 0xF0000
_NUM_PRIVATE = 0xFFFE
"""Number of characters in the private-use plane, from which markers and stand-ins are drawn."""

_MAX_MARKERS_TRIED = 3
_MAX_CUTS = 3

_NAME = re.compile(r"[\w-]*")
"""Words that a template may compare with a constant, such as "user". They get no markers at their
ends."""


class SpecialTokens:
    """The special tokens of one tokenizer: finds them in texts, and encodes texts without them.

    Immutable after creation, so threads may share it.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """`backend` must already have all added tokens. It is shared and not changed."""
        self._backend = backend
        added = {
            token_id: token
            for token_id, token in sorted(backend.get_added_tokens_decoder().items())
            if token.content
        }
        self._contents = {i: token.content for i, token in added.items() if token.special}
        self._starts = {content[:2] for content in self._contents.values()}
        self._lower_starts = {content.lower()[:2] for content in self._contents.values()}
        self._ends = {content[-2:] for content in self._contents.values()}
        self._first = {content[0] for content in self._contents.values()}
        self._last = {content[-1] for content in self._contents.values()}
        self._longest = max(map(len, self._contents.values()), default=0)
        self._heads = {c[:n] for c in self._contents.values() for n in range(1, len(c))}
        self._tails = {c[n:] for c in self._contents.values() for n in range(1, len(c))}
        self._is_normalized = backend.normalizer is not None and any(
            token.normalized for token in added.values() if token.special
        )
        # Without flags such as lstrip or single_word, this finder finds a token anywhere in a text,
        # without adjacent spaces.
        bare = {
            token_id: AddedToken(content, normalized=added[token_id].normalized)
            for token_id, content in self._contents.items()
        }
        self._finder = _Finder(backend.normalizer, bare)
        # This finder ignores case, because a template may lower a text's case and so turn
        # "<|IM_END|>" into a special token.
        self._caseless = _Finder(
            normalizers.Lowercase(),
            {i: AddedToken(content, normalized=True) for i, content in self._contents.items()},
        )
        self._reader = _Finder(backend.normalizer, added)
        self._reader.backend.encode_special_tokens = backend.encode_special_tokens
        self._writer = _Writer(backend, added)

    def marked(self, text: str, marker: str) -> str:
        """`text` with `marker` inside each special token, and at each end that could join with
        adjacent text to a special token."""
        places = self._inside(text) | self._at_ends(text)
        if not places:
            return text
        cuts = [0, *sorted(places), len(text)]
        return marker.join(text[begin:end] for begin, end in pairwise(cuts))

    def encode(self, pieces: Sequence[str], *, add_special_tokens: bool) -> list[int]:
        """The token ids of the joined pieces. A special token that spans two or more pieces is
        encoded as plain text.

        Raises InvalidRequestError if the tokenizer can encode such a text only as the special
        token.
        """
        text = "".join(pieces)
        if len(pieces) > 1:
            marks = list(accumulate(map(len, pieces[:-1])))
            spans = [span for span in self._reader.spans(text) if span[0] in self._contents]
            kept = [span for span in spans if not _is_marked(span, marks)]
            if len(kept) < len(spans):
                return self._writer.encode(text, kept, self._contents, add_special_tokens)
        (found,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(found.ids)

    def _inside(self, text: str) -> set[int]:
        """Positions at which to put markers: one inside each special token of the text, whatever
        its case. A token of one character gets one on either side."""
        spans = []
        if self._is_normalized or _has_any(text, self._starts):
            spans += self._finder.spans(text)
        if _has_any(text.lower(), self._lower_starts):
            spans += self._caseless.spans(text)
        places = set()
        for _, begin, end in spans:
            places |= {begin + 1} if end - begin > 1 else {begin, end}
        return places

    def _at_ends(self, text: str) -> set[int]:
        """Positions at the stripped text's ends where adjacent text might complete a special
        token."""
        inner = text.strip()
        if _NAME.fullmatch(inner):
            return set()
        begin = len(text) - len(text.lstrip())
        places = set()
        if self._may_begin_with_tail(inner[: self._longest]):
            places.add(begin)
        if self._may_end_with_head(inner[-self._longest :]):
            places.add(begin + len(inner))
        return places

    def _may_begin_with_tail(self, text: str) -> bool:
        if not (self._is_normalized or text[0] in self._last or _has_any(text, self._ends)):
            return False
        return any(
            form[:count] in self._tails
            for form in self._forms(text)
            for count in range(1, len(form) + 1)
        )

    def _may_end_with_head(self, text: str) -> bool:
        if not (self._is_normalized or text[-1] in self._first or _has_any(text, self._starts)):
            return False
        return any(
            form[-count:] in self._heads
            for form in self._forms(text)
            for count in range(1, len(form) + 1)
        )

    def _forms(self, text: str) -> set[str]:
        """The text, and also its normalized form if the tokenizer matches added tokens in
        normalized text."""
        return {text, self._finder.normalized(text)} if self._is_normalized else {text}


class _Finder:
    """Finds added tokens in texts like the tokenizer, but does not encode the rest."""

    def __init__(
        self, normalizer: normalizers.Normalizer | None, tokens: dict[int, AddedToken]
    ) -> None:
        """`normalizer` is applied to texts. `tokens` are keyed by their ids in the tokenizer."""
        self.backend = tokenizers.Tokenizer(models.WordLevel({"\0": 0}, unk_token="\0"))
        if normalizer is not None:
            self.backend.normalizer = normalizer
        self.backend.add_tokens(list(tokens.values()))
        self._ids: dict[int | None, int] = {
            self.backend.token_to_id(token.content): token_id for token_id, token in tokens.items()
        }

    def spans(self, text: str) -> list[Span]:
        found = _encoding(self.backend, text, False)
        return [
            (self._ids[token_id], begin, end)
            for token_id, (begin, end) in zip(found.ids, found.offsets, strict=True)
            if token_id in self._ids
        ]

    def normalized(self, text: str) -> str:
        normalizer = self.backend.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))


class _Writer:
    """A copy of a tokenizer in which each special token has a secret random text (stand-in) in
    place of its own text."""

    def __init__(self, like: tokenizers.Tokenizer, added: dict[int, AddedToken]) -> None:
        self._backend = tokenizers.Tokenizer(like.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if getattr(like, part) is not None:
                setattr(self._backend, part, getattr(like, part))
        secret = "".join(_private_character() for _ in range(10))
        self._stand_ins = {
            token_id: f"{secret}{chr(_PRIVATE_PLANE + number)}"
            for number, token_id in enumerate(i for i, token in added.items() if token.special)
        }
        self._cut = f"{secret}{secret}"
        for token_id, token in added.items():
            self._backend.add_tokens([self._known(token_id, token)])
        self._backend.add_tokens([AddedToken(self._cut, normalized=False)])
        self._cut_id = self._backend.token_to_id(self._cut)
        self._true_ids = {
            self._backend.token_to_id(self._stand_ins.get(i, token.content)): i
            for i, token in added.items()
        }

    def encode(
        self, text: str, kept: Sequence[Span], contents: dict[int, str], add_special_tokens: bool
    ) -> list[int]:
        """The token ids of `text` in which only the spans in `kept` are special tokens."""
        parts, at = [], 0
        for token_id, begin, end in kept:
            parts += [text[at:begin], self._stand_ins[token_id]]
            at = end
        written = "".join([*parts, text[at:]])
        # The vocabulary may contain a special token's text as a word. Encode, and cut each such
        # word in two, until there is none.
        for _ in range(_MAX_CUTS):
            found = _encoding(self._backend, written, add_special_tokens)
            wrong = self._read_as_special(written, found, contents)
            if not wrong:
                return self._ids_of(found)
            if any(len(content) == 1 for _, content in wrong):
                break  # a word of one character can't be cut
            for place, _ in reversed(wrong):
                written = f"{written[: place + 1]}{self._cut}{written[place + 1 :]}"
        raise InvalidRequestError(
            f"the messages contain {wrong[0][1]!r}, which the model's tokenizer can't encode as"
            " plain text; leave it out",
            "messages",
        )

    def _ids_of(self, found: tokenizers.Encoding) -> list[int]:
        """The encoding's ids, mapped to those of the original tokenizer. Tokens that the
        post-processor added around the text already have them."""
        return [
            token_id if is_around else self._true_ids.get(token_id, token_id)
            for token_id, is_around in zip(found.ids, found.special_tokens_mask, strict=True)
            if token_id != self._cut_id
        ]

    def _known(self, token_id: int, token: AddedToken) -> AddedToken:
        if token_id not in self._stand_ins:
            return token
        content = self._stand_ins[token_id]
        normalizer = self._backend.normalizer
        is_stable = normalizer is None or normalizer.normalize_str(content) == content
        return AddedToken(content, normalized=bool(token.normalized and is_stable))

    def _read_as_special(
        self, text: str, found: tokenizers.Encoding, contents: dict[int, str]
    ) -> list[tuple[int, str]]:
        """Finds plain text that was encoded to a special token's id, because the vocabulary
        contains that token's text as a word. Returns (position, text) of each."""
        wrong = []
        for token_id, (begin, end), is_around in zip(
            found.ids, found.offsets, found.special_tokens_mask, strict=True
        ):
            if token_id not in contents or token_id in self._true_ids or is_around:
                continue
            place = text.find(contents[token_id], begin, end)
            if place >= 0:  # otherwise it is the token for unknown characters
                wrong.append((place, contents[token_id]))
        return wrong


class Escape:
    """Marks special tokens in the texts of one call, and encodes the text that a template renders
    from them."""

    def __init__(self, tokens: SpecialTokens) -> None:
        self._tokens = tokens
        self._marker: re.Pattern[str] | None = None

    def mark(self, values: list[Any]) -> list[Any]:
        """A copy of JSON values with markers in their strings and field names. May be called only
        once.

        Raises InvalidRequestError.
        """
        marker = _marker_for(list(strings_in(values)))
        # A template may write JSON with escapes for non-ASCII characters.
        self._marker = re.compile(f"{marker}|(?i:{re.escape(_in_json(marker))})")
        marked: list[Any] = self._marked(values, marker)
        return marked

    def encode(self, rendered: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a rendered text. Raises InvalidRequestError."""
        pieces = [rendered] if self._marker is None else self._marker.split(rendered)
        return self._tokens.encode(pieces, add_special_tokens=add_special_tokens)

    def unmarked(self, rendered: str) -> str:
        """A rendered text without the markers."""
        return rendered if self._marker is None else self._marker.sub("", rendered)

    def _marked(self, value: Any, marker: str) -> Any:
        if isinstance(value, str):
            return self._tokens.marked(value, marker)
        if isinstance(value, dict):
            return {
                self._marked(name, marker): self._marked(inner, marker)
                for name, inner in value.items()
            }
        if isinstance(value, list):
            return [self._marked(inner, marker) for inner in value]
        return value


def _encoding(
    backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool
) -> tokenizers.Encoding:
    # The batch call releases the GIL, so a long text does not block other threads.
    (found,) = backend.encode_batch([text], add_special_tokens=add_special_tokens)
    return found


def _has_any(text: str, parts: Iterable[str]) -> bool:
    return any(part in text for part in parts)


def _is_marked(span: Span, marks: Sequence[int]) -> bool:
    """True if a marker was inside the token, or on both sides of a token of one character."""
    _, begin, end = span
    at = bisect_right(marks, begin)
    if end - begin == 1:
        return begin in marks[max(0, at - 1) : at] and end in marks[at : at + 1]
    return at < len(marks) and marks[at] < end


def _private_character() -> str:
    return chr(_PRIVATE_PLANE + secrets.randbelow(_NUM_PRIVATE))


def _in_json(character: str) -> str:
    return json.dumps(character)[1:-1]


def _marker_for(texts: Sequence[str]) -> str:
    """A character that occurs in none of the texts, neither directly nor as a JSON escape."""
    for _ in range(_MAX_MARKERS_TRIED):
        marker = _private_character()
        escaped = _in_json(marker)
        if not any(marker in text or ("\\u" in text and escaped in text.lower()) for text in texts):
            return marker
    raise InvalidRequestError(
        "the messages contain many of the private-use characters from U+F0000 to U+FFFFD; leave"
        " them out",
        "messages",
    )


def strings_in(value: Any) -> Iterable[str]:
    """Yields all strings in a JSON value, including field names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from strings_in(name)
            yield from strings_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings_in(inner)
