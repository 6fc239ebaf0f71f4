"""A device sampler over a few rows, on CPU tensors: what `conftest.Batch` is to the host's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.core.sampling_params import DecodingParams
from quire.kernels.transfers import DeviceLink
from quire.sampling.device.history import DeviceHistory
from quire.sampling.device.sampler import DeviceSampler
from quire.sampling.host.history import TokenHistory
from quire.sampling.host.sampler import NO_TOKEN, SampledTokens, SamplingRows

MAX_LEN = 64
CPU = torch.device("cpu")


@dataclass
class DeviceBatch:
    """Sequences in rows 0, 1, ...; `sample` takes one line of logits for each named row."""

    sampler: DeviceSampler
    history: TokenHistory

    def sample(
        self, logits: Any, rows: Sequence[int] | None = None, masks: Any = None
    ) -> SampledTokens:
        lines = torch.as_tensor(logits, dtype=torch.float32).clone()
        chosen = np.arange(len(lines)) if rows is None else np.array(rows, dtype=np.int64)
        result = self.sampler.sample(lines, chosen, masks).fetch()
        lengths = self.history.num_tokens[chosen]
        written = self.history.token_ids[chosen, lengths]
        expected = np.where(result.token_ids == NO_TOKEN, 0, result.token_ids)
        assert written.tolist() == expected.tolist()
        return result

    def append(self, row: int, token_id: int) -> None:
        """As the device did, unless a test appends another token than was sampled."""
        self.history.token_ids[row, self.history.num_tokens[row]] = token_id
        self.history.num_tokens[row] += 1


def make_device_batch(
    vocab_size: int,
    sequences: Sequence[tuple[DecodingParams, Sequence[int], Sequence[int]]],
    branch_indices: Sequence[int] | None = None,
) -> DeviceBatch:
    """As the fixture `make_batch`."""
    num_rows = len(sequences)
    rows = SamplingRows(num_rows, vocab_size)
    token_ids = torch.zeros((num_rows, MAX_LEN), dtype=torch.int32)
    num_tokens = np.zeros(num_rows, dtype=np.int64)
    for row, (params, prompt, output) in enumerate(sequences):
        branch_index = 0 if branch_indices is None else branch_indices[row]
        rows.set_row(row, params, branch_index, len(prompt))
        tokens = [*prompt, *output]
        token_ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        num_tokens[row] = len(tokens)
    sampler = DeviceSampler(rows, DeviceHistory(token_ids, num_tokens), DeviceLink(CPU))
    return DeviceBatch(sampler, TokenHistory(token_ids.numpy(), num_tokens))
