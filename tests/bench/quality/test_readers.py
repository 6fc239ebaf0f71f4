"""Models that read text in their number formats: figures against bounds, on held-out text."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.outlier_model import make_outlier_model

from quire.bench.quality.comparison import Quality, Reference, compare
from quire.bench.quality.readers import EngineReader, Reader, SimulatedReader, open_reader
from quire.bench.quality.windows import Window
from quire.core.sampling_params import SamplingParams
from quire.errors import ConfigurationError

HELDOUT = Path(__file__).parents[2] / "data" / "heldout"
OPTIONS = {"dtype": "float32"}
WINDOW_TOKENS = 1024


@pytest.fixture(scope="module")
def windows() -> list[Window]:
    token_ids = np.fromfile(HELDOUT / "val_code.bin", dtype="<u2").tolist()
    starts = (0, 40_000)
    return [Window(tuple(token_ids[start : start + WINDOW_TOKENS]), 1) for start in starts]


@pytest.fixture(scope="module")
def exact_reader() -> EngineReader:
    return EngineReader(OPTIONS)


@pytest.fixture(scope="module")
def reference(exact_reader, windows) -> Reference:
    hidden = [exact_reader.hidden(window) for window in windows]
    return Reference(hidden, EngineReader(OPTIONS).take_head())


def _quality(reader: Reader, windows: list[Window], reference: Reference) -> Quality:
    exact = Reference(reference.hidden[: len(windows)], reference.logits)
    hidden = (reader.hidden(window) for window in windows)
    return compare(windows, hidden, reader.logits, exact)


def test_the_engine_equals_the_head_that_is_left_of_it(exact_reader, windows, reference):
    found = _quality(exact_reader, windows, reference)
    assert found.divergence == 0.0 and found.agreement == 1.0
    assert found.num_tokens == 2 * (WINDOW_TOKENS - 1)
    assert 2.6 < found.loss < 3.3  # of code, as the model's card says
    assert exact_reader.token_bytes == 2 * 4 * 2 * 64 * 4  # K and V, layers, heads, elements, fp32
    assert exact_reader.linear_bits == 32.0


def test_the_loss_is_that_of_prompt_logprobs(exact_reader, reference):
    window = Window((5, 6, 7, 8), 2)
    exact = Reference([exact_reader.hidden(window)], exact_reader.logits)
    found = compare([window], exact.hidden, exact_reader.logits, exact)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    (output,) = exact_reader._llm.generate({"prompt_token_ids": list(window.token_ids)}, params)
    assert output.prompt_logprobs is not None
    expected = [-output.prompt_logprobs[at][window.token_ids[at]].logprob for at in (2, 3)]
    assert found.loss == pytest.approx(sum(expected) / 2, abs=1e-5)


def test_int8_keys_keep_their_bounds(windows, reference):
    reader = SimulatedReader(OPTIONS, "int8")
    found = _quality(reader, windows, reference)
    assert found.change < 0.001
    assert found.divergence < 0.002 and found.agreement > 0.99
    assert reader.token_bytes == 2 * 4 * 2 * 66 and reader.is_simulated


def test_fewer_bits_and_outliers_cost_more(tmp_path, windows, reference):
    model = str(make_outlier_model(tmp_path / "x256", 256))
    found = {
        name: _quality(SimulatedReader(OPTIONS, name), windows[:1], reference)
        for name in ("int8", "fp8", "int4")
    }
    assert found["int8"].divergence < found["fp8"].divergence < found["int4"].divergence
    reader = SimulatedReader({**OPTIONS, "model": model}, "int8")
    outliers = _quality(reader, windows[:1], reference)
    assert outliers.divergence > 0.002 and outliers.divergence > 20 * found["int8"].divergence


@pytest.mark.parametrize(("name", "bits", "bound"), [("int8", 10, 0.005), ("int4", 6, 0.03)])
def test_rounded_weights_keep_the_quality(windows, reference, name, bits, bound):
    reader = EngineReader({**OPTIONS, "quantization": name})
    found = _quality(reader, windows, reference)
    assert found.divergence > 0.0 and found.change < bound
    assert reader.linear_bits < bits and reader.dtype == "float32"


def test_weights_and_keys_are_rounded_together(windows, reference):
    reader = open_reader({**OPTIONS, "quantization": "int4"}, "fp8")
    assert isinstance(reader, SimulatedReader) is not torch.cuda.is_available()
    assert reader.linear_bits < 6 and reader.weight_bytes < 16 << 20
    assert _quality(reader, windows[:1], reference).divergence > 0.0


def test_a_model_without_a_head_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="which predicts no tokens"):
        EngineReader({"runner": "pooling"})
