"""The token ids of every row, as the sampler sees them.

They lie in the runner's persistent batch. It knows no requests and owns nothing. The runner makes
one and keeps it for its lifetime.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """Views of the runner's arrays, indexed by row; the runner goes on writing to them.

    token_ids: [max_rows, max_len], prompt and generated tokens.
    num_tokens: [max_rows], how many of token_ids count; the next token's absolute position.
    """

    token_ids: Ints
    num_tokens: Ints
