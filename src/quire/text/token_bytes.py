"""Which bytes each token adds to a text.

The tokenizers library can only say what a whole sequence of tokens decodes to. A stream needs the
share of each token, and a token may be a part of a character, so the share is bytes, not text. This
module finds it from the decoder that the tokenizer declares, once per token, and refuses decoders
whose tokens have no fixed share. Called by `text.tokenizer`.
"""

import json
import re
from typing import Any

import tokenizers

from quire.errors import CheckpointError

# Decoders that give each token the same share wherever it stands, the first one aside.
_UNDERSTOOD = frozenset(
    {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece"}
)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Token id -> the bytes that the token adds to a text. Filled in as tokens come up.

    Invariant: joining `first` of the first token and `following` of all others gives the bytes
    whose UTF-8 decoding is the tokenizer's own decoding. There is one exception, on purpose: a run
    of byte tokens that is not wholly valid UTF-8 is replaced wholesale by the tokenizers library,
    while here the characters that are whole in it survive.

    There are three kinds of tokens:

        byte-level    each character of the token's text stands for a byte ("Ġ" for a space)
        byte token    "<0x0A>", in vocabularies that fall back to bytes: that byte
        plain text    what the decoder appends for it after some other token (the *anchor*): this
                      tells " the" from "the", which decoding the token alone may not
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Raises CheckpointError for a decoder whose tokens have no fixed share of the text."""
        self._backend = backend
        steps = _decoder_steps(backend)
        self._byte_level = any(step["type"] == "ByteLevel" for step in steps)
        self._byte_fallback = any(step["type"] == "ByteFallback" for step in steps)
        self._following: dict[int, bytes] = {}
        self._whole: dict[int, str | None] = {}
        if not self._byte_level:
            self._anchor_id = self._find_anchor()
            self._anchor_text = self._decode(self._anchor_id)

    def following(self, token_id: int) -> bytes:
        """The bytes of `token_id` behind other tokens; empty for an id that is no token."""
        share = self._following.get(token_id)
        if share is None:
            share = self._following[token_id] = self._compute(token_id)
        return share

    def whole(self, token_id: int) -> str | None:
        """`following` as text; None where it is not made of whole characters."""
        try:
            return self._whole[token_id]
        except KeyError:
            pass
        try:
            text: str | None = self.following(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self._whole[token_id] = text
        return text

    def first(self, token_id: int) -> bytes:
        """The bytes of `token_id` at the start of a text, where some decoders drop a space."""
        share = self.following(token_id)
        if self._byte_level or not share or (len(share) == 1 and not share.isascii()):
            return share  # bytes as they are; a lone byte above 0x7F decodes to nothing useful
        return self._decode(token_id).encode()

    def _compute(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return _byte_level_bytes(token)
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        text = self._decode(self._anchor_id, token_id)
        assert text.startswith(self._anchor_text), (token, text)
        return text[len(self._anchor_text) :].encode()

    def _decode(self, *token_ids: int) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def _find_anchor(self) -> int:
        for token_id in range(self._backend.get_vocab_size(with_added_tokens=True)):
            text = self._decode(token_id)
            if text and "\ufffd" not in text:
                return token_id
        raise CheckpointError("no token of tokenizer.json stands for any text")


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The decoder's steps in a flat list; empty where tokens are just joined with spaces."""
    if backend.decoder is None:
        return []
    steps = _flatten(json.loads(backend.decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    unknown = sorted(set(kinds) - _UNDERSTOOD)
    if unknown or any(step["type"] == "Strip" and step["stop"] for step in steps):
        raise CheckpointError(
            f"tokenizer.json has a decoder of type {', '.join(unknown) or 'Strip with a stop'}, "
            f"but only these can be streamed: {', '.join(sorted(_UNDERSTOOD))}"
        )
    if "ByteLevel" in kinds and set(kinds) - {"ByteLevel", "Fuse"}:
        raise CheckpointError(
            f"tokenizer.json combines the decoders {', '.join(kinds)}, but ByteLevel can be "
            "streamed only by itself"
        )
    return steps


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _flatten(part)]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_ALPHABET = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """A token with any character outside the alphabet, as added tokens are, stands for itself."""
    stand_ins = [_BYTE_ALPHABET.get(character) for character in token]
    if None in stand_ins:
        return token.encode()
    return bytes(byte for byte in stand_ins if byte is not None)
