"""Small tokenizers of the kinds that real models have, made from a few lines of text."""

import json
from typing import Any

import tokenizers
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps on",
    "def join(path, *paths): return the path that joins all of the paths",
    "naïve café, Grüße aus Köln; 你好,世界 🙂 👋🏽 مرحبا",
    "A sentence. Another sentence!  Two spaces\n\nand a new paragraph\twith a tab 1234567890",
]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# The pattern of Qwen2's tokenizers: transformers puts it in by the class name, whatever the file.
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE as Qwen's: every byte is a token, special and plain added tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(QWEN2_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    backend.add_tokens([AddedToken("<tool_call>", normalized=False), "世x", "two words"])
    return backend


def make_sentencepiece(*, adds_bos: bool = True) -> tokenizers.Tokenizer:
    """BPE over "▁"-marked words that falls back to byte tokens, as Llama 2's and Mistral's."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        [*CORPUS[:2], CORPUS[3]], trainers.BpeTrainer(vocab_size=150, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=[tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens(["[TOOL]"])
    return backend


def make_plain(decoder: Any) -> tokenizers.Tokenizer:
    """Whole words with `decoder`, which needs no bytes."""
    words = ["[UNK]", "hello", "world", "##ly", "▁hello", "▁", "▁▁", ".", "don", "'", "##t", "né"]
    vocab = {word: index for index, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token="[UNK]"))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["[SEP]"])
    return backend


PLAIN_DECODERS: dict[str, Any] = {
    "none": None,
    "word_piece": decoders.WordPiece(),
    "metaspace": decoders.Metaspace(),
    "metaspace_never": decoders.Metaspace(prepend_scheme="never"),
}
