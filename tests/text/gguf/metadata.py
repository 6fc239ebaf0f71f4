"""Metadata of GGUF files as llama.cpp's converter writes it, made of small tokenizers."""

import json
from pathlib import Path
from typing import Any

import tokenizers

from quire.text.gguf.vocabulary import PREFIX, TokenType

HARD_TEXTS = [
    "",
    " ",
    "Hello world",
    "  leading, trailing  ",
    "two  spaces\n\nand\ttabs\r\n \n",
    "don't WE'RE 'S we'Ll",
    "1 12 123 1234 12345 3.14159 1,000,000",
    "你好,世界 🙂 👋🏽 naïve cafe\u0301 ÀÉÎ ẞ ﬁ ½ ①",
    "مرحبا العالم нещо на Български កាន់តែ हिन्दी",
    "def f(x):\n    return x  # comment\n\n\n",
    "snake_case camelCase HTTPServer/path//to ======--- ''''''",
    "<|im_start|>user\nhi<|im_end|>\n<tool_call>x</s>",
    "\x00\x7f\ufffd\u200d",
]


def byte_level_metadata(backend: tokenizers.Tokenizer, pre: str, **more: Any) -> dict[str, Any]:
    """As of a model with this byte-level tokenizer. more: without "tokenizer.ggml."."""
    model = json.loads(backend.to_str())["model"]
    added = backend.get_added_tokens_decoder()
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    types = [
        TokenType.NORMAL
        if i not in added
        else TokenType.CONTROL
        if added[i].special
        else TokenType.USER_DEFINED
        for i in range(len(tokens))
    ]
    return _with_prefix(
        model="gpt2",
        pre=pre,
        tokens=tokens,
        token_type=list(map(int, types)),
        merges=[" ".join(pair) for pair in model["merges"]],
        **more,
    )


def trained_sentencepiece(**more: Any) -> dict[str, Any]:
    """As of the model in sentencepiece_bpe.json: 460 tokens that SentencePiece has trained."""
    found = _golden()
    return {"general.architecture": "llama"} | _with_prefix(
        model="llama",
        tokens=found["tokens"],
        scores=found["scores"],
        token_type=found["types"],
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        **more,
    )


def sentencepiece_answers() -> list[tuple[str, list[int]]]:
    """Texts, and what SentencePiece itself makes of them."""
    return [(text, token_ids) for text, token_ids in _golden()["texts"]]


def _golden() -> dict[str, Any]:
    path = Path(__file__).with_name("sentencepiece_bpe.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _with_prefix(**fields: Any) -> dict[str, Any]:
    return {PREFIX + name: value for name, value in fields.items()}
