"""`quire bench perplexity`: a row for each combination, and what can't be measured."""

import argparse
import json
import shutil
from pathlib import Path

import pytest
from tests.embedded_gguf import write_embedded_gguf

from quire.bench.quality import perplexity
from quire.bench.quality.measuring import Combination, combine
from quire.bench.quality.perplexity import NOT_ALL_MEASURED
from quire.bench.quality.quality_file import find_quality
from quire.errors import ConfigurationError
from quire.hub.model_folder import EMBEDDED_MODEL

TEXT = "def main():\n    return 0\n" * 9


def _arguments(*words: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    perplexity.add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def _rows(printed: str) -> list[list[str]]:
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_weights_and_keys_are_measured_in_one_table(text, tmp_path, capsys):
    output = tmp_path / "out.json"
    formats = ("--quantization", "none", "int8", "--kv-cache-dtype", "auto", "fp8")
    args = _arguments(text, *formats, "--window-tokens", 16, "--output-json", output)
    assert perplexity.main(args) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("embedded model in ") and "windows of 16 tokens at most" in printed
    head, _, *rows = _rows(printed)
    assert [row[:2] for row in rows] == [
        ["none", "auto"],
        ["none", "fp8"],
        ["int8", "auto"],
        ["int8", "fp8"],
    ]
    assert head[:4] == ["weights", "KV", "perplexity", "change"] and rows[0][3] == ""
    assert all("% ±" in row[3] for row in rows[1:])
    written = json.loads(output.read_text())
    assert written["window_tokens"] == 16 and written["texts"] == [str(text)]
    for row, result in zip(rows, written["results"], strict=True):
        assert row[2] == f"{result['perplexity']:.4f}"
        assert result["quantization"] == (None if row[0] == "none" else row[0])
        assert result["model_id"] == "embedded model" and result["is_simulated"] == (
            "simulated" in row[-1]
        )
    assert written["results"][0]["divergence"] == 0.0 < written["results"][3]["divergence"]


def test_a_file_made_of_a_model_is_compared_with_it(text, tmp_path, capsys):
    path = write_embedded_gguf(tmp_path / "q8.gguf", kind="Q8_0")
    args = _arguments(text, "--model", EMBEDDED_MODEL, "--model", path, "--quantization", "none")
    assert perplexity.main(args) == 0
    _, _, exact, found = _rows(capsys.readouterr().out)
    assert exact[:2] == [EMBEDDED_MODEL.name, "none"]
    assert found[:2] == ["q8.gguf", "as stored"] and found[3].startswith("+")


def test_measurements_are_kept_for_the_doctor(text, tmp_path, caplog):
    text.write_text(TEXT * 20)
    words = ("--quantization", "none", "int8", "--max-tokens", 1024, "--window-tokens", 128)
    kept = tmp_path / "kept.json"
    assert perplexity.main(_arguments(text, *words, "--quality-file", kept)) == 0
    (found,) = (each for each in find_quality(kept, EMBEDDED_MODEL) if each.texts == "text.txt")
    assert (found.quantization, found.kv_cache_dtype, found.num_tokens) == ("int8", "auto", 512)
    assert found.reference.startswith("embedded model in ")
    assert perplexity.main(_arguments(text, *words, "--quality-file", text / "file")) == 0
    assert "can't be kept" in caplog.text


def test_a_model_that_is_quantized_already_is_measured_as_it_is(text, tmp_path, capsys):
    path = write_embedded_gguf(tmp_path / "q8.gguf", kind="Q8_0")
    assert perplexity.main(_arguments(text, "--model", path)) == 0
    _, _, *rows = _rows(capsys.readouterr().out)
    assert [row[0] for row in rows] == ["as stored"]


def test_a_combination_that_cannot_be_had_says_why(text, capsys, monkeypatch):
    args = _arguments(text, "--kv-cache-dtype", "int8")
    monkeypatch.setattr("quire.bench.quality.measuring.open_reader", _refuse)
    assert perplexity.main(args) == NOT_ALL_MEASURED
    _, _, exact, refused = _rows(capsys.readouterr().out)
    assert exact[1] == "auto" and refused == ["none", "int8", "not measured: not on this machine"]


def _refuse(options: object, kv_cache_dtype: str) -> None:
    raise ConfigurationError("not on this machine")


def test_a_model_of_other_tokens_is_not_compared(text, tmp_path, capsys):
    other = Path(shutil.copytree(EMBEDDED_MODEL, tmp_path / "other"))
    rules = json.loads((other / "tokenizer.json").read_text())
    vocabulary = rules["model"]["vocab"]
    vocabulary["def"], vocabulary["in"] = vocabulary["in"], vocabulary["def"]
    (other / "tokenizer.json").chmod(0o644)
    (other / "tokenizer.json").write_text(json.dumps(rules))
    args = _arguments(text, "--model", EMBEDDED_MODEL, "--model", other, "--quantization", "none")
    assert perplexity.main(args) == NOT_ALL_MEASURED
    assert "whose tokens are not the reference's" in capsys.readouterr().out


def test_the_reference_comes_first_whatever_is_asked_for():
    found = list(combine(["a", "b"], [None], {"a": ["int8"], "b": [None]}, ["int8"]))
    assert found == [
        Combination("a"),
        Combination("a", None, "int8", "int8"),
        Combination("b", None, None, "int8"),
    ]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--window-tokens", 1], "window_tokens is 1, but must be at least 2"),
        (["--window-tokens", 5000], "window_tokens is 5000, but the model's context takes 4095"),
        (["--max-tokens", 0], "max_tokens is 0, but must be at least 2"),
        (["--output-json", "/no/such/folder/x"], "no such folder"),
    ],
)
def test_options_that_cannot_be_measured_are_refused(text, words, match):
    with pytest.raises(ConfigurationError, match=match):
        perplexity.main(_arguments(text, *words))


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "readable file"),
        (b"\xff\xfe\xff", "UTF-8"),
        (b"", "is empty"),
        (b"a", "nothing to predict"),
    ],
)
def test_unreadable_or_empty_text_is_refused(tmp_path, content, match):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=match):
        perplexity.main(_arguments(path))
