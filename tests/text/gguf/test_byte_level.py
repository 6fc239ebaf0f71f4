"""Byte-level tokenizers from metadata split texts as those of transformers do."""

from typing import Any

import pytest
import tokenizers
from tests.text.gguf.metadata import HARD_TEXTS, byte_level_metadata
from tests.text.small_tokenizers import CORPUS, make_byte_level
from tokenizers import AddedToken, Regex, models, pre_tokenizers, trainers
from transformers import CohereTokenizer, GPT2Tokenizer, Qwen2Tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from quire.errors import CheckpointError, UnsupportedModelError
from quire.text.gguf.backend import build_backend
from quire.text.gguf.pre_tokenizers import PRE_TOKENIZERS


def train(
    pre_tokenizer: pre_tokenizers.PreTokenizer, normalizer: Any = None
) -> tokenizers.Tokenizer:
    """Many words of the hard texts become tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*CORPUS, *HARD_TEXTS], trainer)
    backend.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    backend.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return backend


def check_equal(
    theirs: tokenizers.Tokenizer, pre: str, *, ignore_merges: bool = False, **more: Any
) -> None:
    ours = build_backend(byte_level_metadata(theirs, pre, **more))
    theirs.model.ignore_merges = ignore_merges
    for text in HARD_TEXTS:
        found = ours.encode(text, add_special_tokens=False)
        assert found.ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(found.ids, skip_special_tokens=False) == theirs.decode(
            found.ids, skip_special_tokens=False
        )


@pytest.mark.parametrize(
    ("pre", "kind"),
    [
        ("gpt-2", GPT2Tokenizer),
        ("qwen2", Qwen2Tokenizer),
        ("qwen35", Qwen3_5Tokenizer),
        ("command-r", CohereTokenizer),
    ],
)
def test_the_rules_of_a_class_of_transformers(pre: str, kind: Any) -> None:
    like = kind().backend_tokenizer
    trained = train(like.pre_tokenizer, like.normalizer)
    trained.decoder = like.decoder
    check_equal(trained, pre)


@pytest.mark.parametrize("pre", sorted(GGUF_PRE_TOKENIZER_SPLITS))
def test_the_rules_that_transformers_reads_from_gguf_files(pre: str) -> None:
    steps = [
        pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    rules = PRE_TOKENIZERS[pre]
    trained = train(pre_tokenizers.Sequence(steps), rules.normalizer())
    trained.decoder = tokenizers.decoders.ByteLevel()
    check_equal(trained, pre, ignore_merges=rules.whole_words)


TEXT = "I'll pay 12345 Euro, AND\n\n  日本語ひらがな한국 x=foo/bar!!\nÜber1"
SPLITS = {
    # With these rules the vocabularies that llama.cpp has for its tests give the originals' tokens.
    "deepseek-v3": (
        "I|'ll|Ġpay|Ġ|123|45|ĠEuro|,|ĠAND|ĊĊ|ĠĠ|日本語ひらがな|한국|Ġx|=foo|/bar|!!Ċ|Über|1"
    ),
    "deepseek-llm": (
        "I|'|ll|Ġpay|Ġ|1|2|3|4|5|ĠEuro|,|ĠAND|Ċ|Ċ|ĠĠ|日本語ひらがな한국|Ġx|=|foo|/|bar|!!|Ċ|Ü|ber|1"
    ),
    "deepseek-coder": (
        "I|'|ll|Ġpay|Ġ|1|2|3|4|5|ĠEuro|,|ĠAND|Ċ|Ċ|Ġ|Ġ|日本語ひらがな한국|Ġx|=|foo|/|bar|!!|Ċ|Über|1"
    ),
    "glm4": ("I|'ll|Ġpay|Ġ|123|45|ĠEuro|,|ĠAND|ĊĊ|Ġ|Ġ日本語ひらがな한국|Ġx|=foo|/bar|!!Ċ|Über|1"),
    "refact": (
        "I|'ll|Ġpay|Ġ|1|2|3|4|5|ĠEuro|,|ĠAND|ĊĊĠ|Ġ日本語ひらがな한국|Ġx|=|foo|/|bar|!!|Ċ|Über|1"
    ),
    "gpt-4o": ("I'll|Ġpay|Ġ|123|45|ĠEuro|,|ĠAND|ĊĊ|Ġ|Ġ日本語ひらがな한국|Ġx|=foo|/bar|!!Ċ|Über|1"),
}


@pytest.mark.parametrize("pre", sorted(SPLITS))
def test_texts_are_split_as_expected(pre: str) -> None:
    split = PRE_TOKENIZERS[pre].build(add_prefix_space=False)
    found = [TEXT[begin:end] for _, (begin, end) in split.pre_tokenize_str(TEXT)]
    shown = "|".join(found).replace(" ", "Ġ").replace("\n", "Ċ")
    assert shown == SPLITS[pre]


def test_placeholders_are_no_tokens() -> None:
    metadata = byte_level_metadata(make_byte_level(), "qwen2")
    count = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += [f"[PAD{count}]", f"[PAD{count + 1}]", ""]
    metadata["tokenizer.ggml.token_type"] += [5, 5, 5]
    backend = build_backend(metadata)
    assert backend.get_vocab_size() == count
    assert backend.id_to_token(count) is None


def test_special_tokens_around_texts() -> None:
    around = {"bos_token_id": 0, "eos_token_id": 1}
    text, plain = "hi", None
    for adds, expected in (
        ({"add_bos_token": False}, (0, 0)),
        ({"add_bos_token": True}, (1, 0)),
        ({"add_bos_token": True, "add_eos_token": True}, (1, 1)),
    ):
        backend = build_backend(byte_level_metadata(make_byte_level(), "qwen2", **around, **adds))
        plain = backend.encode(text, add_special_tokens=False).ids
        before, after = [0] * expected[0], [1] * expected[1]
        assert backend.encode(text).ids == [*before, *plain, *after]
        both = backend.encode(text, text)
        assert both.ids == [*before, *plain, *after] * 2
        assert both.type_ids[-1] == 1
    for pre, expected_first in (("llama-bpe", 0), ("qwen2", plain and plain[0])):
        backend = build_backend(byte_level_metadata(make_byte_level(), pre, **around))
        assert backend.encode(text).ids[0] == expected_first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "kimi-k2"}, r"tokenizer\.ggml\.pre says \('kimi-k2'\).*--tokenizer"),
        ({"pre": "default"}, "does not say how texts are split"),
        ({"pre": None}, "does not say how texts are split"),
        ({"model": "t5"}, r"of the kind 't5' \(tokenizer\.ggml\.model\).*--tokenizer"),
        ({"model": "none"}, "of the kind 'none'"),
        ({"model": None}, r"it has no tokenizer .*--tokenizer"),
        ({"model": 3}, r"tokenizer\.ggml\.model is 3, but must be a string"),
        ({"tokens": []}, "tokens is empty"),
        ({"tokens": [1, 2]}, "must be a list of strings"),
        ({"tokens": "abc"}, "must be a list"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "tokens has 'a' twice"),
        ({"token_type": [1]}, r"token_type has 1 entries, but there are \d+ tokens"),
        ({"token_type": ["a"] * 1000}, r"must be a list of numbers \(int\)"),
        ({"token_type": [1.5] * 1000}, r"must be a list of numbers \(int\)"),
        ({"scores": [True] * 1000}, r"must be a list of numbers \(float\)"),
        ({"merges": ["ab"]}, "merges has 'ab', which is not two parts"),
        ({"merges": ["no such"]}, "has 'no such', but not all of 'no', 'such' and 'nosuch' are"),
        ({"merges": None}, r"it has no tokenizer\.ggml\.merges"),
        ({"bos_token_id": 100_000}, r"bos_token_id is 100000, but there are \d+ tokens"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x', but must be an integer"),
        ({"add_bos_token": 1}, "add_bos_token is 1, but must be true or false"),
    ],
)
def test_unreadable_tokenizers_are_refused_with_the_reason(
    change: dict[str, Any], message: str
) -> None:
    metadata = byte_level_metadata(make_byte_level(), "qwen2")
    metadata |= {"tokenizer.ggml." + name: value for name, value in change.items()}
    metadata = {name: value for name, value in metadata.items() if value is not None}
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        build_backend(metadata)


def test_without_types_special_tokens_are_told_by_names_and_texts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metadata = byte_level_metadata(make_byte_level(), "qwen2", eos_token_id=300)
    expected = build_backend(metadata)
    del metadata["tokenizer.ggml.token_type"]
    found = build_backend(metadata)
    assert "has no tokenizer.ggml.token_type" in caplog.text
    special = {text: i for text, i in _special_ids(expected).items() if text.startswith("<|")}
    assert special
    assert special.items() <= _special_ids(found).items()
    assert 300 in _special_ids(found).values()
    text = "<|im_start|>user\nhello<|im_end|>"
    assert found.encode(text).ids == expected.encode(text).ids


def _special_ids(backend: tokenizers.Tokenizer) -> dict[str, int]:
    added = backend.get_added_tokens_decoder()
    return {token.content: token_id for token_id, token in added.items() if token.special}
