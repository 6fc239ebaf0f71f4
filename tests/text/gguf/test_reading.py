"""A GGUF file's tokenizer and templates, read where a model's folder would be."""

from pathlib import Path

import pytest
from tests.gguf_writer import write_gguf
from tests.text.gguf.metadata import byte_level_metadata, trained_sentencepiece
from tests.text.small_tokenizers import make_byte_level

from quire.errors import CheckpointError, UnsupportedModelError
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_config import tokenizer_fields


def test_a_file_has_a_tokenizer_and_a_template(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    metadata = trained_sentencepiece() | {"tokenizer.chat_template": template}
    path = write_gguf(tmp_path / "tiny.gguf", metadata, {})
    tokenizer = Tokenizer.from_folder(path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.vocab_size == 460
    assert tokenizer.encode("the fox")[0] == 1
    rendered = ChatTemplate.from_folder(path).render(
        [{"role": "user", "content": "hi"}], add_generation_prompt=False
    )
    assert rendered == "<s>hi</s>"
    assert tokenizer_fields(path)["eos_token"] == "</s>"
    given = ChatTemplate.from_option("{{ eos_token }}", path)
    assert given.render([{"role": "user", "content": "hi"}]) == "</s>"


def test_a_file_without_a_template_has_none(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", byte_level_metadata(make_byte_level(), "qwen2"), {})
    assert not ChatTemplate.from_folder(path).exists
    assert Tokenizer.from_folder(path).eos_token_id is None


def test_errors_name_the_file(tmp_path: Path) -> None:
    metadata = byte_level_metadata(make_byte_level(), "no-such")
    path = write_gguf(tmp_path / "m.gguf", metadata, {})
    with pytest.raises(UnsupportedModelError, match=rf"^{path}: its tokenizer\.ggml\.pre"):
        Tokenizer.from_folder(path)
    metadata["tokenizer.chat_template"] = 3
    write_gguf(path, metadata, {})
    with pytest.raises(CheckpointError, match=rf"^{path}: tokenizer\.chat_template is 3"):
        ChatTemplate.from_folder(path)
    path.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=rf"^{path} is not a whole GGUF file"):
        Tokenizer.from_folder(path)


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for text in ("one", "three"):
        write_gguf(path, trained_sentencepiece() | {"tokenizer.chat_template": text}, {})
        rendered = ChatTemplate.from_folder(path).render([{"role": "user", "content": "hi"}])
        assert rendered == text
