"""Token ids of every row in device memory, for the device's sampler.

The host plans the next step before it knows which tokens this step samples; for planning, the
number of tokens is enough. So the host counts the tokens, and their ids stay on the device. The
sampler appends ids, the next step reads its inputs from this history, and penalties and bad words
look up earlier tokens in it.
"""

from dataclasses import dataclass

import torch

from quire.sampling.host.history import Ints


@dataclass(frozen=True, slots=True)
class DeviceHistory:
    """The tokens of all rows; the runner owns the arrays."""

    #: [max_rows, max_len] int32 on the device: prompt and generated tokens.
    token_ids: torch.Tensor
    #: [max_rows], on the host: the number of valid token_ids once all queued work has run, which is
    #: also the next token's absolute position. The runner increases it after each `sample`.
    num_tokens: Ints
