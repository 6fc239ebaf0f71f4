"""What a folder's configuration says, in its older and newer forms, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.errors import CheckpointError
from quire.text.tokenizer_config import read_tokenizer_config


def test_empty_folder_says_nothing(tmp_path: Path) -> None:
    config = read_tokenizer_config(tmp_path)
    assert config.special_token_texts == {} and config.chat_template is None
    assert not config.added_tokens and not config.extra_special_tokens


def test_named_tokens_in_every_form(save_folder: Callable[..., Path]) -> None:
    fields = {
        "bos_token": None,
        "eos_token": "</s>",
        "pad_token": {"__type": "AddedToken", "content": "<pad>", "lstrip": True},
        "image_token": "<image>",
        "add_bos_token": True,
        "some_token": {"not": "a token"},
        "extra_special_tokens": {"audio_token": "<audio>"},
    }
    config = read_tokenizer_config(save_folder(tokenizer_config=fields))
    assert config.special_token_texts == {
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "image_token": "<image>",
        "audio_token": "<audio>",
    }
    assert config.named_tokens["pad_token"].lstrip
    assert all(token.special for token in config.named_tokens.values())


@pytest.mark.parametrize("name", ["extra_special_tokens", "additional_special_tokens"])
def test_tokens_without_a_name(save_folder: Callable[..., Path], name: str) -> None:
    folder = save_folder(tokenizer_config={name: ["[X]", {"content": "[Y]", "special": False}]})
    extra = read_tokenizer_config(folder).extra_special_tokens
    assert [(token.content, token.special) for token in extra] == [("[X]", True), ("[Y]", True)]


def test_listed_tokens_keep_their_flags(save_folder: Callable[..., Path]) -> None:
    listed = {"7": {"content": "<t>", "special": False, "single_word": True}}
    config = read_tokenizer_config(save_folder(tokenizer_config={"added_tokens_decoder": listed}))
    token = config.added_tokens[7]
    assert (token.content, token.special, token.single_word) == ("<t>", False, True)


@pytest.mark.parametrize("listed, eos", [({"0": {"content": "a"}}, "new"), (None, "old")])
def test_special_tokens_map_is_the_older_way(
    save_folder: Callable[..., Path], listed: Any, eos: str
) -> None:
    fields: dict[str, Any] = {"eos_token": "new"}
    if listed is not None:
        fields["added_tokens_decoder"] = listed
    folder = save_folder(tokenizer_config=fields, special_tokens_map={"eos_token": "old"})
    assert read_tokenizer_config(folder).special_token_texts == {"eos_token": eos}


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]", b"3"])
def test_corrupt_file_is_refused_by_name(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_tokenizer_config(tmp_path)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"eos_token": 3},
        {"eos_token": {"lstrip": True}},
        {"extra_special_tokens": [None]},
        {"added_tokens_decoder": {"x": {"content": "a"}}},
        {"added_tokens_decoder": {"1": {"content": "a", "unheard_of": 1}}},
        {"added_tokens_decoder": [1]},
    ],
    ids=json.dumps,
)
def test_malformed_token_is_refused(
    save_folder: Callable[..., Path], fields: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError, match="tokenizer_config"):
        read_tokenizer_config(save_folder(tokenizer_config=fields))


@pytest.mark.parametrize(
    ("of_tokenizer", "of_processor", "has_processor", "chosen"),
    [
        (None, "json", False, "json"),
        ("config", "json", False, "config"),
        ("config", "json", True, "json"),
        ("config", "", True, "config"),
        ("", "json", False, "json"),
        ("", None, False, None),
        (None, "", False, None),
    ],
)
def test_a_template_in_a_file_of_its_own_belongs_to_the_processor(
    tmp_path: Path,
    of_tokenizer: str | None,
    of_processor: str | None,
    has_processor: bool,
    chosen: str | None,
) -> None:
    fields = {} if of_tokenizer is None else {"chat_template": of_tokenizer}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    if of_processor is not None:
        text = json.dumps({"chat_template": of_processor})
        (tmp_path / "chat_template.json").write_text(text)
    if has_processor:
        (tmp_path / "preprocessor_config.json").write_text("{}")
    assert read_tokenizer_config(tmp_path).chat_template == chosen


@pytest.mark.parametrize("content", ['{"chat_template": 3}', "{}", '["a"]', "{{ messages }}"])
def test_a_template_file_that_holds_none_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "chat_template.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"chat_template\.json"):
        read_tokenizer_config(tmp_path)


def test_a_text_in_place_of_a_list_of_special_tokens_is_refused(
    save_folder: Callable[..., Path],
) -> None:
    """Each of its letters would become a special token."""
    for name in ("extra_special_tokens", "additional_special_tokens"):
        with pytest.raises(CheckpointError, match="extra special tokens are '<x>', but must be a"):
            read_tokenizer_config(save_folder(tokenizer_config={name: "<x>"}))
