"""Fixtures of the text tests: the small tokenizers, and model folders made of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tests.text.small_tokenizers import (
    PLAIN_DECODERS,
    make_byte_level,
    make_plain,
    make_sentencepiece,
)
from tokenizers import AddedToken

from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_config import TokenizerConfig


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    eos = AddedToken("<|im_end|>", special=True)
    return Tokenizer(make_byte_level(), TokenizerConfig(named_tokens={"eos_token": eos}))


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    named = {"bos_token": AddedToken("<s>"), "eos_token": AddedToken("</s>")}
    return Tokenizer(make_sentencepiece(), TokenizerConfig(named_tokens=named))


@pytest.fixture(scope="session", params=sorted(PLAIN_DECODERS))
def plain(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(make_plain(PLAIN_DECODERS[request.param]))


@pytest.fixture
def save_folder(tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that writes a model folder: tokenizer.json and what else is given."""

    def save(backend: tokenizers.Tokenizer | None = None, **files: Any) -> Path:
        if backend is not None:
            backend.save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
        return tmp_path

    return save
