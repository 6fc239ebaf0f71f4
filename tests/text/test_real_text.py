"""SmolLM2's tokenizer and chat template beside transformers', and those of its GGUF file."""

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from quire.text.chat_encoding import encode_chat
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent.parent
NUM_TEXTS = 2000
# First and last characters of ranges of Unicode.
ALPHABETS = (
    (0x20, 0x7E),
    (0xA0, 0x24F),
    (0x370, 0x3FF),
    (0x400, 0x4FF),
    (0x590, 0x6FF),
    (0x900, 0x97F),
    (0xE00, 0xE7F),
    (0x2000, 0x206F),
    (0x3040, 0x30FF),
    (0x4E00, 0x4FFF),
    (0xAC00, 0xACFF),
    (0x1F300, 0x1F6FF),
    (0x1D400, 0x1D4FF),
    (0x300, 0x36F),
    (0xFE00, 0xFE0F),
)
PIECES = (
    *(" ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u200d", "\ufeff", "0", "12", "345"),
    *("1234567", "'s", "'LL", "don't", "def f(x):", "    return", "==", "!=", "->", "/* */", "://"),
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<repo_name>",
        "<|im_",
        "👩‍👩‍👧",
        "é",
        "e\u0301",
    ),
    *("user\n", "ﬁ", "ß", "İ", "…", "½", "\x00", "\x7f"),
)
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": " And twice that? \n"},
    ],
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": "多语言 text\n\n\twith code:\n```python\nprint('🙂')\n```"}],
    [{"role": "assistant", "content": "I begin."}, {"role": "user", "content": "No."}],
    [{"role": "user", "content": "{{ messages }} {% raw %} & <b>"}],
]


def texts() -> list[str]:
    """Alphabets by themselves and mixed, whitespace and special tokens, code, pages of prose."""
    draw = random.Random(40)
    found = []
    files = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "src/quire").rglob("*.py"))]
    for _ in range(NUM_TEXTS // 4):
        page = draw.choice(files).read_text(encoding="utf-8")
        start = draw.randrange(max(1, len(page) - 200))
        found.append(page[start : start + draw.randrange(1, 200)])
    while len(found) < NUM_TEXTS:
        parts = []
        for _ in range(draw.randrange(1, 12)):
            if draw.random() < 0.5:
                parts.append(draw.choice(PIECES))
            else:
                first, last = draw.choice(ALPHABETS)
                count = draw.randrange(1, 8)
                parts.append("".join(chr(draw.randint(first, last)) for _ in range(count)))
        found.append(draw.choice(("", " ")).join(parts))
    return found


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module", params=["folder", "GGUF"])
def path(request: pytest.FixtureRequest, smollm2: Path, smollm2_gguf: Path) -> Path:
    return smollm2 if request.param == "folder" else smollm2_gguf


def test_2000_texts_are_encoded_and_decoded_alike(
    path: Path, reference: PreTrainedTokenizerBase
) -> None:
    tokenizer = Tokenizer.from_folder(path)
    given = texts()
    assert len(given) == NUM_TEXTS and len(set(given)) > NUM_TEXTS * 0.95
    expected = reference(given)["input_ids"]
    for text, token_ids in zip(given, expected, strict=True):
        assert tokenizer.encode(text) == token_ids, repr(text)
        decoded = tokenizer.decode(token_ids, skip_special_tokens=False)
        assert decoded == reference.decode(token_ids, skip_special_tokens=False), repr(text)
        assert decoded == text, repr(text)
        assert tokenizer.decode(token_ids) == reference.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("adds_prompt", [True, False])
def test_conversations_are_rendered_and_encoded_alike(
    path: Path, reference: PreTrainedTokenizerBase, adds_prompt: bool
) -> None:
    template, tokenizer = ChatTemplate.from_folder(path), Tokenizer.from_folder(path)
    for messages in CONVERSATIONS:
        options: dict[str, Any] = {"add_generation_prompt": adds_prompt}
        expected = reference.apply_chat_template(messages, tokenize=False, **options)
        assert template.render(messages, **options) == expected
        token_ids = reference.apply_chat_template(messages, **options)["input_ids"]
        assert encode_chat(template, tokenizer, messages, **options).token_ids == token_ids
