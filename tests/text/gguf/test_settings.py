"""What is named, and which templates there are, as tokenizer_config.json would say it."""

import pytest

from quire.errors import CheckpointError
from quire.text.gguf.settings import read_settings

TOKENS = ["<unk>", "<s>", "</s>", "<pad>"]
BASE = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": TOKENS}


def test_special_tokens_have_names() -> None:
    usual = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert read_settings(BASE) == usual
    named = {"tokenizer.ggml.padding_token_id": 3, "tokenizer.ggml.add_bos_token": False}
    assert read_settings(BASE | named) == usual | {"pad_token": "<pad>", "add_bos_token": False}
    byte_level = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.eos_token_id": 3}
    assert read_settings(BASE | byte_level) == {"eos_token": "<pad>"}


def test_templates_have_names() -> None:
    one = {"tokenizer.chat_template": "{{ messages }}"}
    assert read_settings(BASE | one)["chat_template"] == "{{ messages }}"
    more = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "tools"}
    assert read_settings(BASE | one | more)["chat_template"] == [
        {"name": "default", "template": "{{ messages }}"},
        {"name": "tool_use", "template": "tools"},
    ]


def test_an_empty_template_is_none() -> None:
    empty = {"tokenizer.chat_template": ""}
    assert "chat_template" not in read_settings(BASE | empty)
    more = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "tools"}
    found = read_settings(BASE | empty | more)["chat_template"]
    assert found == [{"name": "tool_use", "template": "tools"}]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokenizer.chat_template": 1}, r"chat_template is 1, but must be a string"),
        ({"tokenizer.chat_templates": "a"}, r"chat_templates is 'a', but must be a list"),
        ({"tokenizer.ggml.tokens": 3}, r"tokens is 3, but must be a list"),
    ],
)
def test_unreadable_settings_are_refused_with_the_reason(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_settings(BASE | fields)
