"""Drafts of a drafter, and the probabilities that it gives them."""

import numpy as np
import pytest
import torch

from quire.kernels.cpu.library import NativeKernels, load_library
from quire.kernels.cpu.sampling import NativeSampling
from quire.sampling.host.draft_sampler import DraftSampler
from quire.sampling.host.sampler import NO_TOKEN, SamplingRows

VOCAB_SIZE = 300


@pytest.mark.parametrize("is_native", [False, True])
def test_probabilities_are_those_of_the_logits_whatever_the_options(is_native: bool) -> None:
    native = NativeSampling(NativeKernels(load_library(), None, 1)) if is_native else None
    rows = SamplingRows(4, VOCAB_SIZE)
    rows.draws["top_p"], rows.draws["log_min_p"] = 1.0, -np.inf
    rows.draws["temperature"] = (0.0, 0.5, 1.5, 0.0)
    rows.draws["stream"] = np.arange(4)
    logits = 3 * torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(4))
    logits[3, 7] = torch.nan
    found = DraftSampler(rows, native).sample(logits, np.arange(4), np.arange(10, 14))
    token_ids = found.token_ids.tolist()
    assert token_ids[0] == int(logits[0].argmax()) and token_ids[3] == NO_TOKEN
    expected = logits[:3].softmax(1)[np.arange(3), token_ids[:3]]
    assert found.probabilities[:3] == pytest.approx(expected.numpy(), rel=1e-4)
