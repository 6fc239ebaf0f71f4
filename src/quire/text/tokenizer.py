"""Converts text to token ids and back, by the rules in a tokenizer.json or GGUF file.

Called by the API server, the offline API, the command line and `text.detokenizer`.

The tokenizers library decodes only whole sequences. Streaming needs the text of each token, and a
token may be part of a character. So `TokenBytes` derives the bytes of each token from the decoder
in the file, once per token.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
import tokenizers.models

from quire.errors import CheckpointError, InvalidRequestError, check_characters
from quire.hub.model_files import foreign_content, is_gguf, shown_text
from quire.text.gguf.reading import read_gguf_backend
from quire.text.special_tokens import SpecialTokens
from quire.text.tokenizer_config import TokenizerConfig, read_tokenizer_config

_WITH_WORD_CACHE = (tokenizers.models.BPE, tokenizers.models.Unigram)
_UNCONVERTED_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "tiktoken.model")


class Tokenizer:
    """A vocabulary with its rules: encodes texts, decodes token ids, and looks up single tokens.

    tokenizer.json alone decides how text is split and which special tokens `encode` adds. Like
    transformers 5, this class ignores add_bos_token and add_eos_token of tokenizer_config.json,
    since the post-processor in tokenizer.json already has them. It always takes the rules from the
    file, unlike transformers 5, which replaces the rules of a few classes (LlamaTokenizer,
    Qwen2Tokenizer) by its own. Decoding never cleans up spaces.

    Immutable after creation, so threads may share it.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: TokenizerConfig | None = None,
        *,
        remembers_words: bool = True,
    ) -> None:
        """Takes ownership of `backend`, and adds to it the tokens that only `config` lists.

        remembers_words: cache the tokens of the first 10,000 different words, which saves 45% of
            the time to encode a long text. If several users share the tokenizer, the cache's timing
            reveals which words other users' texts contain.
        """
        config = config or TokenizerConfig()
        if not remembers_words and isinstance(backend.model, _WITH_WORD_CACHE):
            backend.model._resize_cache(0)  # the library has no public name for it
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = config.split_special_tokens
        backend.add_tokens(_missing_tokens(backend, config))
        self._backend = backend
        self._bytes = TokenBytes(backend)
        #: Number of tokens, including added tokens; the model's embedding may have more rows.
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        #: The ids of the special tokens, which decoding with skip_special_tokens omits.
        self.special_token_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self.bos_token_id = _named_token_id(backend, config, "bos_token")
        self.eos_token_id = _named_token_id(backend, config, "eos_token")

    @classmethod
    def from_folder(cls, folder: Path, *, remembers_words: bool = True) -> "Tokenizer":
        """Read the tokenizer of the model in `folder`, which may be a GGUF file.

        remembers_words: as in `Tokenizer`.
        Raises CheckpointError that names the missing or unreadable file, and UnsupportedModelError
        for a GGUF file with an unknown kind of tokenizer.
        """
        if folder.is_file():
            backend, config = read_gguf_backend(folder), read_tokenizer_config(folder)
            return cls(backend, config, remembers_words=remembers_words)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(_missing_file_message(folder))
        config = read_tokenizer_config(folder)
        return cls(_read_backend(path), config, remembers_words=remembers_words)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`.

        add_special_tokens: include the tokens that the tokenizer puts around a text, often a BOS
            token. Set it to False for a rendered chat template, which already contains them.
        Raises InvalidRequestError if `text` is not a string or has a lone surrogate.
        """
        try:
            # The batch call releases the GIL, so a long text does not block other threads.
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            return list(encoding.ids)
        except TypeError:
            _check_text(text)
            raise

    def encode_pair(
        self,
        first: str,
        second: str | None,
        max_tokens: int | None = None,
        *,
        keeps_end: bool = False,
    ) -> tuple[list[int], list[int]]:
        """Encode one text, or two texts joined by the tokenizer's rules for pairs. Returns the
        token ids, and the token type ids, which tell the texts apart.

        max_tokens: truncate the second text, or the only one, at its end so that the result has at
            most this many tokens. Special tokens around the texts are kept.
        keeps_end: truncate that text at its beginning instead.
        Raises InvalidRequestError as `encode` does.
        """
        inputs = first if second is None else (first, second)
        try:
            (encoding,) = self._backend.encode_batch([inputs])
        except TypeError:
            for text in (first, second or ""):
                _check_text(text)
            raise
        token_ids, types = encoding.ids, encoding.type_ids  # each access copies the whole list
        excess = 0 if max_tokens is None else len(token_ids) - max_tokens
        cut: set[int] = set()
        if excess > 0:
            last = 0 if second is None else 1
            places = [i for i, text in enumerate(encoding.sequence_ids) if text == last]
            cut = set(places[:excess] if keeps_end else places[-excess:])
        kept = [i for i in range(len(token_ids)) if i not in cut]
        return [token_ids[i] for i in kept], [types[i] for i in kept]

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """`encode` for many texts at once, on all CPU cores."""
        try:
            encodings = self._backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
        except TypeError:
            for text in texts:
                _check_text(text)
            raise
        return [list(encoding.ids) for encoding in encodings]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`. Ids beyond the vocabulary are ignored.

        An incomplete or malformed character becomes U+FFFD. To decode a growing sequence, use
        `text.detokenizer`. Raises InvalidRequestError for a number that can't be a token id.
        """
        try:
            # The batch call releases the GIL, as in `encode`.
            (text,) = self._backend.decode_batch(
                [list(token_ids)], skip_special_tokens=skip_special_tokens
            )
            return text
        except OverflowError as error:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < 1 << 32)
            raise InvalidRequestError(
                f"{wrong} is not a token id; token ids go from 0 to {self.vocab_size - 1}"
            ) from error

    @cached_property
    def special_tokens(self) -> SpecialTokens:
        """Finds special tokens in texts, and encodes them as plain text."""
        return SpecialTokens(self._backend)

    @cached_property
    def added_tokens(self) -> Mapping[str, int]:
        """Text -> id of all added tokens, special or not."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items()}

    @cached_property
    def longest_token_bytes(self) -> int:
        """An upper bound of the bytes that a single token adds to a text."""
        return max(len(token.encode()) for token in self._backend.get_vocab())

    def special_ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        """The ids of those of the given texts that are special tokens."""
        found = {self._backend.token_to_id(text) for text in texts}
        return self.special_token_ids & found

    @property
    def token_ids(self) -> dict[str, int]:
        """The ids of all tokens by their entries in the vocabulary."""
        return self._backend.get_vocab(with_added_tokens=True)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text; they may be only part of a character.

        The joined bytes of a text's tokens are its UTF-8 encoding, except for a leading space that
        some tokenizers add when encoding and remove when decoding. Special tokens also have bytes;
        ids beyond the vocabulary have none.
        """
        return self._bytes.following(token_id)

    def first_token_bytes(self, token_id: int) -> bytes:
        """`token_bytes` of a text's first token, without a leading space that the decoder
        removes."""
        return self._bytes.first(token_id)

    def whole_text(self, token_id: int) -> str | None:
        """`token_bytes` as text; None for a token that does not consist of whole characters."""
        return self._bytes.whole(token_id)

    def token_text(self, token_id: int) -> str:
        """The token as text for display; U+FFFD stands for partial characters."""
        return self.token_bytes(token_id).decode(errors="replace")

    def encode_bad_word(self, word: str) -> list[list[int]]:
        """The token sequences that spell `word`, an entry of a request's `bad_words`.

        A word can have different tokens at the start of a text, after other letters, and after a
        space ("Ġword"), so the list has a sequence for each case. A sequence that ends with a
        shorter one of the list is omitted, since banning the shorter one is enough. For a `word`
        that begins with a space, the list has only sequences with that space. Raises
        InvalidRequestError for a word that has no tokens.
        """
        forms = (word,) if word.startswith(" ") else (word, " " + word)
        encoded = [self.encode(form, add_special_tokens=False) for form in forms]
        if not encoded[0]:
            raise InvalidRequestError(
                f"bad_words contains {word!r}, which has no tokens", "bad_words"
            )
        sequences = encoded + [self._encode_behind_text(form) for form in forms]
        distinct = sorted({(len(sequence), *sequence) for sequence in sequences if sequence})
        kept: list[list[int]] = []
        for _, *sequence in distinct:
            if not any(sequence[-len(shorter) :] == shorter for shorter in kept):
                kept.append(sequence)
        return kept

    def encode_inside(self, text: str) -> list[int]:
        """The tokens of `text` inside a longer text, without special tokens. Empty if no encoding
        decodes to exactly this text."""
        written = text.encode()
        for encoded in (
            self._encode_behind_text(text),
            self.encode(text, add_special_tokens=False),
        ):
            is_text = self.special_token_ids.isdisjoint(encoded)
            if is_text and b"".join(map(self.token_bytes, encoded)) == written:
                return encoded
        return []

    def encode_continuation(self, text: str) -> list[int]:
        """The tokens of `text` where it continues another text. Adds no special tokens, but encodes
        those that the text contains. Raises InvalidRequestError as `encode` does."""
        return self._encode_behind_text(text) or self.encode(text, add_special_tokens=False)

    def _encode_behind_text(self, text: str) -> list[int]:
        """The tokens of `text` after a line break; empty if a token spans the line break and the
        text."""
        before = self.encode("\n", add_special_tokens=False)
        both = self.encode("\n" + text, add_special_tokens=False)
        return both[len(before) :] if both[: len(before)] == before else []


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        with path.open("rb") as file:
            other = foreign_content(file.read(64))
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
    if other is not None:
        raise CheckpointError(f"{path} is {other}")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for all errors
        raise CheckpointError(
            f"{path} can't be read ({shown_text(error)}); copy it again from where the model came"
            " from"
        ) from error


def _missing_tokens(
    backend: tokenizers.Tokenizer, config: TokenizerConfig
) -> list[tokenizers.AddedToken]:
    """The tokens of `config` that the backend lacks, or has with different flags."""
    present = list(backend.get_added_tokens_decoder().values())
    known = {repr(token) for token in present}
    listed = [token for _, token in sorted(config.added_tokens.items())]
    missing = [token for token in listed if repr(token) not in known]
    contents = {token.content for token in (*present, *missing)}
    for token in (*config.named_tokens.values(), *config.extra_special_tokens):
        if token.content not in contents:
            contents.add(token.content)
            missing.append(token)
    return missing


def _named_token_id(
    backend: tokenizers.Tokenizer, config: TokenizerConfig, name: str
) -> int | None:
    token = config.named_tokens.get(name)
    return None if token is None else backend.token_to_id(token.content)


def _missing_file_message(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder, so there is no tokenizer to read"
    if not any(folder.iterdir()):
        return (
            f"{folder} has no tokenizer.json, nor any other file; name a folder with a model in "
            "Hugging Face's format"
        )
    if any(map(is_gguf, folder.glob("*.gguf"))) and not (folder / "config.json").exists():
        return f"{folder} has models in GGUF format only; name the file of one of them"
    found = [name for name in _UNCONVERTED_FILES if (folder / name).exists()]
    if not found:
        return f"{folder} has no tokenizer.json; copy it from where the model came from"
    return (
        f"{folder} has {' and '.join(found)} but no tokenizer.json, the only supported format. "
        f"Convert it once with transformers: AutoTokenizer.from_pretrained({str(folder)!r})"
        f".save_pretrained({str(folder)!r})"
    )


def _check_text(text: object) -> None:
    """Raises InvalidRequestError for a text that can't be encoded."""
    if not isinstance(text, str):
        raise InvalidRequestError(f"a text must be a string, but is a {type(text).__name__}")
    check_characters(text, None)


# Decoder types with which a token adds the same bytes at every position except the first.
_UNDERSTOOD = frozenset(
    {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece"}
)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Computes, and caches, the bytes that each token adds to a text.

    Invariant: for tokens t0, t1, t2, .., the tokenizer's own decoding is the UTF-8 decoding of

        first(t0) + following(t1) + following(t2) + ..

    There is one intended exception. If a run of byte tokens is not valid UTF-8, the tokenizers
    library replaces the whole run by U+FFFD, while this class keeps its complete characters.

    There are three kinds of tokens:

        byte-level    each character of the token's text stands for a byte ("Ġ" for a space)
        byte token    "<0x0A>" stands for this byte, in vocabularies with byte fallback
        plain text    the text that the token adds when it is decoded after another token

    For plain text, that other token is always the same, the *anchor*. Decoding a token alone would
    be wrong, since some decoders then drop the leading space of " the".
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Raises CheckpointError if the bytes of a token may depend on its neighbors, so that the
        decoder can't be streamed, or if no token has text."""
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
        """The bytes of `token_id` after other tokens; empty if the id is not in the vocabulary."""
        share = self._following.get(token_id)
        if share is None:
            share = self._following[token_id] = self._compute(token_id)
        return share

    def whole(self, token_id: int) -> str | None:
        """`following` as text; None if it does not consist of whole characters."""
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
        """The bytes of `token_id` at the start of a text, where some decoders drop a leading
        space."""
        share = self.following(token_id)
        if self._byte_level or not share or (len(share) == 1 and not share.isascii()):
            return share  # unchanged: a single byte above 0x7F is never a whole character
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
        raise CheckpointError("no token of tokenizer.json has any text")


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The decoder's steps as a flat list; empty if there is no decoder, so that tokens are joined
    with spaces."""
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
    """Maps the 256 printable characters that stand for bytes in byte-level vocabularies (GPT-2) to
    the bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_ALPHABET = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """The bytes that the characters of a byte-level token stand for. If a character is outside the
    byte alphabet, as in some added tokens, the token's text in UTF-8."""
    stand_ins = [_BYTE_ALPHABET.get(character) for character in token]
    if None in stand_ins:
        return token.encode()
    return bytes(byte for byte in stand_ins if byte is not None)
