"""Token ids of every row in device memory, for the device's sampler.

The device writes the values, the host counts them. The host plans the next step before it knows
what this one samples; it needs only how many tokens a row has. So the values live on the device:
the sampler appends to them, the next step's inputs are read from them, and penalties and bad words
look back into them.
"""

from dataclasses import dataclass

import torch

from quire.sampling.host.history import Ints


@dataclass(frozen=True, slots=True)
class DeviceHistory:
    """Made and kept by the runner.

    token_ids: [max_rows, max_len] int32 on the device, prompt and generated tokens.
    num_tokens: [max_rows], on the host: how many of token_ids count once all that is queued has
        run; the next token's absolute position. The runner moves it on after each `sample`.
    """

    token_ids: torch.Tensor
    num_tokens: Ints
