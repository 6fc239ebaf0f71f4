"""SmolLM2's GGUF file beside llama.cpp itself, where its package for Python is installed."""

import ctypes
from pathlib import Path

import pytest
import torch
from benchmarks.quality.block_quantized import quality, read, said, windows

from quire.bench.quality.comparison import Reference
from quire.bench.quality.windows import Window


def llama_cpp_logits(path: Path, window: Window) -> Reference:
    """Of the positions that predict, as a reference whose hidden states are the logits."""
    import llama_cpp  # may be missing

    length = len(window.token_ids)
    model = llama_cpp.Llama(str(path), n_ctx=length, n_batch=length, logits_all=True, verbose=False)
    model.eval(window.token_ids)
    logits = ctypes.cast(llama_cpp.llama_get_logits(model.ctx), ctypes.POINTER(ctypes.c_float))
    found = torch.tensor(logits[: model.n_vocab() * length]).view(length, -1)
    return Reference([found[window.predicting]], lambda rows: rows)


@pytest.mark.usefixtures("native_engine")
def test_logits_are_those_of_llama_cpp(smollm2: Path, smollm2_gguf: Path) -> None:
    """Both round activations, so they differ from each other about as much as from the numbers."""
    pytest.importorskip("llama_cpp", reason="llama.cpp's package is not installed")
    (window,) = windows(smollm2, 1, 128)
    theirs = llama_cpp_logits(smollm2_gguf, window)
    found = quality([window], theirs, read(smollm2_gguf, [window], dtype="float32"))
    assert found.divergence < 0.015 and found.agreement > 0.9, said(found)
