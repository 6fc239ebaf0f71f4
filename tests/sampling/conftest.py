"""A sampler over a few rows, built in one line, for all tests of this folder."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from quire.core.sampling_params import DecodingParams
from quire.kernels.cpu.library import NativeKernels, NativeLibrary
from quire.kernels.cpu.sampling import NativeSampling
from quire.sampling.host.history import TokenHistory
from quire.sampling.host.sampler import SampledTokens, Sampler, SamplingRows

MAX_LEN = 64


@dataclass
class Batch:
    """Sequences in rows 0, 1, ...; `sample` takes one line of logits for each named row."""

    sampler: Sampler
    history: TokenHistory

    def sample(
        self, logits: Any, rows: Sequence[int] | None = None, masks: Any = None
    ) -> SampledTokens:
        lines = torch.as_tensor(logits, dtype=torch.float32).clone()
        chosen = list(range(len(lines))) if rows is None else list(rows)
        return self.sampler.sample(lines, chosen, self.history, masks)

    def append(self, row: int, token_id: int) -> None:
        self.history.token_ids[row, self.history.num_tokens[row]] = token_id
        self.history.num_tokens[row] += 1


MakeBatch = Callable[..., Batch]


@pytest.fixture(scope="session", params=["torch", "native"])
def native(request: pytest.FixtureRequest) -> NativeSampling | None:
    """Both ways in which a sampler may choose."""
    if request.param == "torch":
        return None
    library: NativeLibrary = request.getfixturevalue("native_library")
    return NativeSampling(NativeKernels(library, num_threads=2))


@pytest.fixture(scope="session")  # builds anew at each call; Hypothesis wants no less
def make_batch(native: NativeSampling | None) -> MakeBatch:
    """make_batch(vocab_size, [(params, prompt, output), ...], branch_indices=None) -> Batch."""

    def make(
        vocab_size: int,
        sequences: Sequence[tuple[DecodingParams, Sequence[int], Sequence[int]]],
        branch_indices: Sequence[int] | None = None,
    ) -> Batch:
        num_rows = len(sequences)
        rows = SamplingRows(num_rows, vocab_size)
        history = TokenHistory(
            np.zeros((num_rows, MAX_LEN), dtype=np.int32), np.zeros(num_rows, dtype=np.int64)
        )
        for row, (params, prompt, output) in enumerate(sequences):
            branch_index = 0 if branch_indices is None else branch_indices[row]
            rows.set_row(row, params, branch_index, len(prompt))
            tokens = [*prompt, *output]
            history.token_ids[row, : len(tokens)] = tokens
            history.num_tokens[row] = len(tokens)
        return Batch(Sampler(rows, native), history)

    return make


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tests' tensors are small; threads would only get in each other's way."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
