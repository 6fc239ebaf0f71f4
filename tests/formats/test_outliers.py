"""int8 and int4 bear activations of which a few channels are far greater than the rest."""

from pathlib import Path

import numpy as np
import pytest
from benchmarks.quality.block_quantized import quality, read, said
from benchmarks.quality.heldout import HELDOUT
from tests.assembly.format_checks.test_weight_format_check import write_w8a8
from tests.outlier_model import make_massive_channels

from quire.bench.quality.comparison import Reference
from quire.bench.quality.windows import Window
from quire.hub.model_folder import EMBEDDED_MODEL

FP32 = {"dtype": "float32"}


@pytest.fixture(scope="module")
def text() -> list[Window]:
    token_ids = np.fromfile(HELDOUT / "val_code.bin", dtype="<u2")[:384]
    return [Window(tuple(token_ids.tolist()), 1)]


@pytest.fixture(scope="module")
def exact(text: list[Window]) -> Reference:
    return read(EMBEDDED_MODEL, text, **FP32)


@pytest.mark.usefixtures("native_engine")
def test_int8_bears_what_one_scale_a_token_does_not(
    tmp_path: Path, text: list[Window], exact: Reference
) -> None:
    model = make_massive_channels(tmp_path / "x32", 32)
    same = quality(text, exact, read(model, text, **FP32))
    assert same.divergence < 1e-6, said(same)
    found = quality(text, exact, read(model, text, **FP32, quantization="int8"))
    assert 0 < found.divergence < 0.002, said(found)
    token_scales = quality(text, exact, read(write_w8a8(model, tmp_path / "w8a8"), text, **FP32))
    assert token_scales.divergence > 12 * found.divergence, said(token_scales)


@pytest.mark.usefixtures("native_engine")
def test_int4_bears_smaller_ones(tmp_path: Path, text: list[Window], exact: Reference) -> None:
    """At 32 times the rest it would lose 0.2 nats: the groups of 32 weights that read an outlier
    have one small weight that matters more than the others."""
    model = make_massive_channels(tmp_path / "x8", 8)
    found = quality(text, exact, read(model, text, **FP32, quantization="int4"))
    assert 0 < found.divergence < 0.05, said(found)
