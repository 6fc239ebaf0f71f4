"""A rewritten checkpoint is compared with transformers' model of its numbers, or is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.checkpoints.quantized.writers import change, set_settings
from transformers import PreTrainedModel

from quire.errors import CheckpointError, UnsupportedModelError
from quire.formats.block_quantized.linear_methods import BlockQuantizedMethods
from quire.formats.block_quantized.weights import BlockFormat
from quire.formats.dense import DenseMethod
from quire.layers.sharded import LinearMethods
from quire.models.checkpoints.loader import load_model
from quire.models.checkpoints.readers import open_checkpoint
from quire.models.interface import TextModel
from quire.models.registry import load_config


@pytest.fixture
def load_quantized_model() -> Callable[[Path], TextModel]:
    """Loads a model whose weights stay codes, by torch in float32."""
    methods = LinearMethods(DenseMethod(), block_quantized=BlockQuantizedMethods())
    return lambda folder: load_model(
        folder,
        load_config(folder),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=32,
        methods=methods,
    )


@pytest.fixture
def assert_settings_refused(tmp_path: Path) -> Callable[[dict[str, Any], str], None]:
    """A config.json with these settings is refused in one line that names the folder."""

    def check(settings: dict[str, Any], message: str) -> None:
        (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        set_settings(tmp_path, settings)
        with pytest.raises((CheckpointError, UnsupportedModelError)) as caught:
            load_config(tmp_path)
        text = str(caught.value)
        assert message in text and text.isprintable() and len(text) < 600, text
        assert str(tmp_path) in text

    return check


@pytest.fixture
def assert_tensor_refused(load) -> Callable[[Path, str, torch.Tensor | None, str], None]:
    """A checkpoint with this in place of the tensor (None: without it) is refused in one line."""

    def check(folder: Path, ending: str, tensor: torch.Tensor | None, message: str) -> None:
        change(folder, **{ending: tensor})
        with pytest.raises((CheckpointError, UnsupportedModelError)) as caught:
            load(folder)
        assert message in str(caught.value) and "\n" not in str(caught.value), caught.value

    return check


@pytest.fixture
def assert_read(
    assert_same_logits, run, load_quantized_model
) -> Callable[..., dict[str, BlockFormat]]:
    """Numbers are the writer's, whole and in odd spans; the model of numbers has the reference's
    logits, and that of codes nearly. Returns the block formats by name."""

    def check(
        folder: Path, model: PreTrainedModel, numbers: dict[str, torch.Tensor]
    ) -> dict[str, BlockFormat]:
        source = open_checkpoint(folder)
        block_formats = {}
        for name, expected in numbers.items():
            assert source.shape(name) == tuple(expected.shape)
            assert source.stored_as(name) is not None
            block_format = source.block_format(name)
            for span in (range(len(expected)), range(5, 22), range(8, 9)):
                with source.rows(name, span) as rows:
                    torch.testing.assert_close(
                        rows, expected[span.start : span.stop], rtol=1e-6, atol=1e-9
                    )
                if block_format is not None:
                    with source.quantized_rows(name, span) as lent:
                        assert lent.block_format == block_format and torch.equal(
                            lent.numbers(), rows
                        )
            if block_format is not None:
                block_formats[name] = block_format
        assert_same_logits(folder, model)
        methods = BlockQuantizedMethods()
        if any(methods.of(block_format) for block_format in block_formats.values()):
            ids = torch.arange(3, 20)
            with torch.inference_mode():
                expected = model(ids[None]).logits[0]
            found = run(load_quantized_model(folder), ids, [10, 7])
            assert 1e-5 < (found - expected).norm() / expected.norm() < 1e-1
        return block_formats

    return check
