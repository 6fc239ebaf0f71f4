"""Token ids of every row in device memory, for the device's sampler.

The host plans the next step before it knows which tokens this step samples; it needs only the
number of tokens. So the host counts the tokens, and the token ids stay on the device. The sampler
appends them, the next step reads its inputs from them, and penalties and bad words look back into
them.
"""

from dataclasses import dataclass

import torch

from quire.sampling.host.history import Ints


@dataclass(frozen=True, slots=True)
class DeviceHistory:
    """The tokens of all rows, made and kept by the runner."""

    #: [max_rows, max_len] int32 on the device: prompt and generated tokens.
    token_ids: torch.Tensor
    #: [max_rows], on the host: the number of valid token_ids once all queued work has run, and so
    #: the next token's absolute position. The runner increases it after each `sample`.
    num_tokens: Ints
