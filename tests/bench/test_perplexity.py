"""Perplexity: by the definition, and what quantization costs on text that the model never saw."""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import pytest

from quire import LLM
from quire.bench import perplexity
from quire.bench.perplexity import Perplexity, cut, measure
from quire.errors import ConfigurationError

HELDOUT = Path(__file__).parent.parent / "data" / "heldout"
WINDOW_TOKENS = 512
# The kinds of text by the share of each that is read; about 20 thousand tokens.
SHARES = {"val_code": 12, "val_chat_fn": 4, "val_chat_file": 4}


def _heldout() -> list[list[int]]:
    windows: list[list[int]] = []
    for name, num_windows in SHARES.items():
        token_ids = np.fromfile(HELDOUT / f"{name}.bin", dtype="<u2").tolist()
        windows += cut(token_ids, WINDOW_TOKENS)[:num_windows]
    code = np.fromfile(HELDOUT / "val_code.bin", dtype="<u2").tolist()
    return windows + cut(code, WINDOW_TOKENS)[60:80]


def _llm(**options):
    return LLM(disable_log_stats=True, **options)


def _arguments(*words: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    perplexity.add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


@pytest.fixture(scope="module")
def unquantized() -> Perplexity:
    return measure(_llm(), _heldout())


def test_windows_cover_the_text_once():
    assert cut(list(range(7)), 3) == [[0, 1, 2], [3, 4, 5], [6]]
    assert cut([1, 2], 2) == [[1, 2]] and cut([], 2) == []


def test_it_is_the_mean_of_each_windows_predictions():
    llm, windows = _llm(dtype="float32"), [[5, 6, 7, 8], [9], [10, 11]]
    expected = []
    for window in windows:
        for length in range(1, len(window)):
            (output,) = llm.generate(
                {"prompt_token_ids": window[:length]},
                perplexity.SamplingParams(
                    max_tokens=1, logprobs=0, temperature=0, allowed_token_ids=[window[length]]
                ),
            )
            assert output.outputs[0].logprobs is not None
            expected.append(-output.outputs[0].logprobs[0][window[length]].logprob)
    result = measure(llm, windows)
    assert result.num_tokens == len(expected) == 4
    assert result.loss == pytest.approx(sum(expected) / 4, abs=1e-5)
    assert result.perplexity == pytest.approx(math.exp(result.loss))


def test_nothing_to_predict_is_refused():
    with pytest.raises(ConfigurationError, match="less than two tokens"):
        measure(_llm(), [[1], []])


def test_the_embedded_model_is_as_good_as_its_card_says(unquantized: Perplexity):
    assert unquantized.num_tokens > 19_000
    assert 2.6 < unquantized.loss < 3.0  # 3.0 on code, 1.7 to 2.1 on chat


@pytest.mark.parametrize(("quantization", "bound"), [("int8", 1.005), ("int4", 1.03)])
def test_quantization_keeps_the_quality(unquantized: Perplexity, quantization, bound):
    found = measure(_llm(quantization=quantization), _heldout())
    assert found.num_tokens == unquantized.num_tokens
    assert found.perplexity < bound * unquantized.perplexity
    assert found.loss != unquantized.loss


def test_the_command_compares_with_the_first(tmp_path, capsys):
    text, output = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text("def main():\n    return 0\n" * 9)
    args = _arguments(text, "--output-json", output, "--max-tokens", 40, "--window-tokens", 16)
    assert perplexity.main(args) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["none", "int8", "int4"]
    assert "%" not in lines[0] and "%" in lines[1] and "(37 tokens)" in lines[2]
    written = json.loads(output.read_text())
    assert written["window_tokens"] == 16 and written["model_id"] == "embedded model"
    for name, line in zip(["none", "int8", "int4"], lines, strict=True):
        result = written["results"][name]
        assert f"{result['perplexity']:.4f}" in line and result["num_tokens"] == 37


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--window-tokens", 1], "window_tokens is 1, but must be at least 2"),
        (["--max-tokens", 0], "max_tokens is 0, but must be at least 2"),
        (["--output-json", "/no/such/folder/x"], "no such folder"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(tmp_path, words, match):
    text = tmp_path / "text.txt"
    text.write_text("some text")
    with pytest.raises(ConfigurationError, match=match):
        perplexity.main(_arguments(text, *words))


@pytest.mark.parametrize(
    ("content", "match"), [(None, "readable file"), (b"\xff\xfe\xff", "UTF-8"), (b"", "is empty")]
)
def test_a_text_that_is_none_is_refused(tmp_path, content, match):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=match):
        perplexity.main(_arguments(path))
