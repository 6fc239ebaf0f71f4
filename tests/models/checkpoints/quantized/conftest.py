"""The comparison of a rewritten checkpoint with transformers' model of its numbers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from quire.formats.coded import CodedMethods
from quire.formats.codes import Coding
from quire.formats.dense import DenseMethod
from quire.layers.sharded import LinearMethods
from quire.models.checkpoints.loader import load_model
from quire.models.checkpoints.readers import open_checkpoint
from quire.models.registry import load_config

CODED = LinearMethods(DenseMethod(), coded=CodedMethods())


@pytest.fixture
def assert_read(assert_same_logits, run) -> Callable[..., dict[str, Coding]]:
    """Numbers are the writer's, whole and in odd spans; the model of numbers has the reference's
    logits, and that of codes nearly. Returns the codings by name."""

    def check(
        folder: Path, model: PreTrainedModel, numbers: dict[str, torch.Tensor]
    ) -> dict[str, Coding]:
        source = open_checkpoint(folder)
        codings = {}
        for name, expected in numbers.items():
            assert source.shape(name) == tuple(expected.shape)
            assert source.stored_as(name) is not None
            coding = source.coding(name)
            for span in (range(len(expected)), range(5, 22), range(8, 9)):
                with source.rows(name, span) as rows:
                    torch.testing.assert_close(
                        rows, expected[span.start : span.stop], rtol=1e-6, atol=1e-9
                    )
                if coding is not None:
                    with source.coded_rows(name, span) as lent:
                        assert lent.coding == coding and torch.equal(lent.numbers(), rows)
            if coding is not None:
                codings[name] = coding
        assert_same_logits(folder, model)
        if codings:
            ids = torch.arange(3, 20)
            coded = load_model(
                folder,
                load_config(folder),
                dtype=torch.float32,
                device=torch.device("cpu"),
                max_model_len=32,
                methods=CODED,
            )
            with torch.inference_mode():
                expected = model(ids[None]).logits[0]
            found = run(coded, ids, [10, 7])
            assert 1e-5 < (found - expected).norm() / expected.norm() < 1e-1
        return codings

    return check
