"""The quality of KV formats: by the definitions, and against the bounds on held-out text."""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.outlier_model import make_outlier_model

from quire.bench import perplexity
from quire.bench.kv_quality import EngineReader, KVQuality, SimulatedReader, compare
from quire.errors import ConfigurationError

HELDOUT = Path(__file__).parent.parent / "data" / "heldout"
OPTIONS = {"dtype": "float32"}
WINDOW_TOKENS = 2048


@pytest.fixture(scope="module")
def windows() -> list[list[int]]:
    token_ids = np.fromfile(HELDOUT / "val_code.bin", dtype="<u2").tolist()
    return [token_ids[first : first + WINDOW_TOKENS] for first in (0, 40_000)]


@pytest.fixture(scope="module")
def exact_reader() -> EngineReader:
    return EngineReader(OPTIONS)


@pytest.fixture(scope="module")
def exact(exact_reader, windows) -> list[torch.Tensor]:
    return [exact_reader.hidden(window) for window in windows]


def _simulated(windows, exact, name: str, **options) -> KVQuality:
    return compare(SimulatedReader({**OPTIONS, **options}, name), windows, exact)


class _Scripted:
    """Logits are the hidden states."""

    token_bytes, is_simulated = 7, True

    def __init__(self, hidden: torch.Tensor) -> None:
        self._hidden = hidden

    def hidden(self, window):
        return self._hidden

    def logits(self, hidden):
        return hidden.clone()


def test_it_is_what_the_definitions_say():
    window = [0, 2, 1]  # the last position predicts nothing
    exact = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.7, 0.1], [1.0, 0.0, 0.0]]).log()
    found = torch.tensor([[0.25, 0.25, 0.5], [0.1, 0.8, 0.1], [0.0, 1.0, 0.0]]).log()
    result = compare(_Scripted(found), [window], [exact])
    assert result.num_tokens == 2 and result.agreement == 0.5
    assert result.loss == pytest.approx(-(math.log(0.5) + math.log(0.8)) / 2)
    assert result.perplexity == pytest.approx(1 / math.sqrt(0.4))
    first = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    second = 0.2 * math.log(2) + 0.7 * math.log(0.7 / 0.8)
    assert result.divergence == pytest.approx((first + second) / 2)
    assert result.deep_divergence == pytest.approx(second)
    assert (result.token_bytes, result.is_simulated) == (7, True)


def test_the_engine_equals_itself(exact_reader, windows, exact):
    result = compare(exact_reader, windows, exact)
    assert result.divergence == 0.0 and result.agreement == 1.0
    assert result.num_tokens == 2 * (WINDOW_TOKENS - 1)
    assert result.token_bytes == 2 * 4 * 2 * 64 * 4  # K and V, layers, heads, elements, fp32
    llm_loss = perplexity.measure(exact_reader._llm, windows).loss
    assert result.loss == pytest.approx(llm_loss, rel=1e-5)


def test_int8_keeps_its_bounds(exact_reader, windows, exact):
    before = compare(exact_reader, windows, exact)
    found = _simulated(windows, exact, "int8")
    assert found.perplexity < 1.001 * before.perplexity
    assert found.divergence < 0.002 and found.agreement > 0.99
    assert found.token_bytes == 2 * 4 * 2 * 66


def test_fewer_bits_and_outliers_cost_more(tmp_path, windows, exact):
    model = str(make_outlier_model(tmp_path / "x256", 256))
    found = {name: _simulated(windows[:1], exact[:1], name) for name in ("int8", "fp8", "int4")}
    assert found["int8"].divergence < found["fp8"].divergence < found["int4"].divergence
    outliers = _simulated(windows[:1], exact[:1], "int8", model=model)
    assert outliers.divergence > 0.002 and outliers.divergence > 20 * found["int8"].divergence


def _arguments(*words: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    perplexity.add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


def test_the_command_prints_a_line_for_each_format(tmp_path, capsys):
    text, output = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text("def main():\n    return 0\n" * 9)
    args = _arguments(text, "--kv-cache-dtype", "fp8", "auto", "--output-json", output)
    assert perplexity.main(args) == 0
    exact_line, fp8_line = capsys.readouterr().out.splitlines()
    assert exact_line.startswith("auto ") and "KLD" not in exact_line
    assert fp8_line.startswith("fp8 ") and "1056 bytes a token" in fp8_line
    assert fp8_line.endswith(" tokens, simulated)")
    written = json.loads(output.read_text())
    assert written["window_tokens"] == 4095, "the model's full context"
    result = written["results"]["fp8"]
    assert f"mean KLD {result['divergence']:.6f}" in fp8_line and result["is_simulated"]


def test_one_weight_format_at_a_time(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some text")
    args = _arguments(text, "--kv-cache-dtype", "int8", "--quantization", "none", "int8")
    with pytest.raises(ConfigurationError, match="one weight format is measured at a time"):
        perplexity.main(args)
