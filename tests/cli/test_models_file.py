"""The file of `--models`: what its entries become, and the place that each mistake is told with."""

import pytest

from quire.cli.models_file import read_models
from quire.cli.parser import build_parser
from quire.errors import ConfigurationError

GIB = 1 << 30


def read(tmp_path, text, *words):
    path = tmp_path / "models.yaml"
    path.write_text(text)
    return read_models(str(path), build_parser().parse_args(["serve", *words]))


def test_an_entry_has_names_memory_and_flags(tmp_path):
    chat, embed = read(
        tmp_path,
        """
- name: chat
  aliases: [gpt, default]
  model: org/chat
  pinned: true
  memory: 2GiB
  max-model-len: 8k
  enable_prefix_caching: false
  tool-call-parser: hermes
- model: org/embed
  idle-unload: 300
""",
        "--dtype",
        "float32",
        "--max-model-len",
        "4k",
    )
    assert chat.names == ("chat", "gpt", "default")
    assert (chat.memory_bytes, chat.is_pinned) == (2 * GIB, True)
    options = chat.engine_options
    assert (options["model"], options["max_model_len"]) == ("org/chat", 8000)
    assert (options["dtype"], options["enable_prefix_caching"]) == ("float32", False)
    assert chat.server_options == {"tool_call_parser": "hermes"}
    assert embed.names == ("org/embed",)
    assert (embed.memory_bytes, embed.is_pinned) == (None, False)
    assert embed.engine_options["max_model_len"] == 4000  # of the command line
    assert embed.server_options == {"idle_unload_s": 300.0}


def test_an_entry_without_a_model_is_the_embedded_one(tmp_path):
    (only,) = read(tmp_path, "- memory: 64MiB\n")
    assert only.names == ("embedded",)
    assert "model" not in only.engine_options


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "must be a list of models"),
        ("name: chat\n", "must be a list of models"),
        ("- chat\n", "line 1: a model must have keys and values"),
        ("- name: a\n- port: 80\n", "line 2: port holds for the whole server"),
        ("- name: a\n  memory: much\n", "line 2: memory"),
        ("- name: a\n  pinned: maybe\n", "line 2: pinned must be true or false"),
        ("- name: [a, b]\n", "line 1: name must be one text"),
        ("- name: a\n  name: b\n", "line 2: name stands in line 1 already"),
        ("- a: {\n", "not YAML"),
    ],
)
def test_a_mistake_is_told_with_its_line(tmp_path, text, reason):
    with pytest.raises(ConfigurationError, match=reason):
        read(tmp_path, text)


def test_a_flag_that_does_not_exist_is_told_with_its_line(tmp_path, capsys):
    with pytest.raises(SystemExit):
        read(tmp_path, "- name: a\n  max-model-length: 4\n")
    assert "models.yaml, line 2: there is no option --max-model-length" in capsys.readouterr().err


def test_a_model_on_the_command_line_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="model and models are both given"):
        read(tmp_path, "- name: a\n", "org/other")
