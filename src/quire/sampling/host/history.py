"""The token ids of every row, in the arrays that the host's sampler reads.

The runner makes one TokenHistory, with views of the arrays of its persistent batch.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """Views of the runner's arrays, indexed by row, which the runner changes between steps."""

    #: [max_rows, max_len]: prompt and generated tokens.
    token_ids: Ints
    #: [max_rows]: the number of valid token_ids, which is also the next token's absolute position.
    num_tokens: Ints
