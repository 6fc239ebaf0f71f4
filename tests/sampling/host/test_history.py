"""TokenHistory is a view: what the runner writes is what the sampler reads."""

import numpy as np

from quire.sampling.host.history import TokenHistory


def test_it_sees_later_writes() -> None:
    token_ids, num_tokens = np.zeros((2, 4), dtype=np.int32), np.zeros(2, dtype=np.int64)
    history = TokenHistory(token_ids, num_tokens)
    token_ids[1, 0], num_tokens[1] = 7, 1
    assert history.token_ids[1, 0] == 7
    assert history.num_tokens[1] == 1
