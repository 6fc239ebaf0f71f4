"""Log-probabilities of the model's distribution, before any sampling option.

The sampler uses this module for rows that want log-probabilities, and for prompts. The native
library computes them if it exists, otherwise torch. Their results differ only by rounding; ranks
and tokens are equal.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.core.step import TokenLogprobs
from quire.kernels.cpu.sampling import LOGPROB_ROW, NativeSampling
from quire.sampling.host.history import Ints

# Number of logits that are processed at a time, which bounds the temporary memory.
BLOCK_ELEMENTS = 1 << 22


def token_logprobs(
    logits: torch.Tensor,
    token_ids: Ints,
    num_top: Sequence[int],
    *,
    lines: Ints | None = None,
    native: NativeSampling | None = None,
) -> list[TokenLogprobs]:
    """An entry of log-probabilities for each of token_ids [n], with num_top[i] best tokens.

    `logits` [L, V] fp32 are raw. `lines` [n] has the line of the logits for each entry; None means
    line i for entry i. The log-softmax is in fp32. Rank and order are by logit. Tokens with equal
    logits are ordered by id, and all have the rank of the first of them. A NaN logit gives a NaN.
    """
    if native is not None:
        entries = _native_logprobs(native, logits, token_ids, num_top, lines)
        if entries is not None:
            return entries
    if lines is not None:
        logits = logits[torch.from_numpy(lines.astype(np.int64)).to(logits.device)]
    lines_at_once = max(1, BLOCK_ELEMENTS // max(1, logits.shape[1]))
    entries = []
    for start in range(0, len(token_ids), lines_at_once):
        block = slice(start, start + lines_at_once)
        entries += _block_logprobs(logits[block], token_ids[block], num_top[block])
    return entries


def of_listed(entry: TokenLogprobs, logits: torch.Tensor, token_ids: Ints) -> TokenLogprobs:
    """The entry with `token_ids` in place of its best token. `logits` are the raw logits of the
    entry's position."""
    wanted = np.append(token_ids, entry.top_token_ids[0])
    found = logits[torch.from_numpy(wanted).to(logits.device)].double().cpu().numpy()
    return related(entry, found[:-1] - found[-1], token_ids)


def related(
    entry: TokenLogprobs, differences: npt.NDArray[np.floating[Any]], token_ids: Ints
) -> TokenLogprobs:
    """The entry with `token_ids` in place of its best token.

    `differences` are the tokens' logits minus the best token's logit. Their log-probabilities are
    these differences plus the best token's log-probability.
    """
    values = (differences + float(entry.top_logprobs[0])).astype(np.float32)
    values[token_ids == entry.token_id] = entry.logprob
    return entry._replace(
        top_token_ids=tuple(token_ids.tolist()), top_logprobs=tuple(values.tolist())
    )


def _native_logprobs(
    native: NativeSampling,
    logits: torch.Tensor,
    token_ids: Ints,
    num_top: Sequence[int],
    lines: Ints | None,
) -> list[TokenLogprobs] | None:
    """The entries by the native library; None if the largest logit of a line is not finite."""
    queries = np.empty(len(token_ids), LOGPROB_ROW)
    queries["line"] = np.arange(len(token_ids)) if lines is None else lines
    queries["token_id"] = token_ids
    queries["num_top"] = np.minimum(num_top, logits.shape[1])
    values, tokens = native.token_logprobs(logits, queries)
    if np.isnan(values[:, 0]).any():
        return None
    return [
        TokenLogprobs(
            token_id, of_line[0], found[0], tuple(found[1 : k + 1]), tuple(of_line[1 : k + 1])
        )
        for token_id, of_line, found, k in zip(
            token_ids.tolist(),
            values.tolist(),
            tokens.tolist(),
            queries["num_top"].tolist(),
            strict=True,
        )
    ]


def _block_logprobs(
    logits: torch.Tensor, token_ids: Ints, num_top: Sequence[int]
) -> list[TokenLogprobs]:
    logprobs = logits.log_softmax(dim=1)
    chosen = torch.from_numpy(token_ids.astype(np.int64)).to(logits.device).unsqueeze(1)
    own = logprobs.gather(1, chosen).squeeze(1).tolist()
    rank = ((logits > logits.gather(1, chosen)).sum(dim=1) + 1).tolist()
    top = top_token_ids(logits, min(max(num_top), logits.shape[1]))
    top_logprobs = logprobs.gather(1, torch.from_numpy(top).to(logits.device)).tolist()
    return [
        TokenLogprobs(token_id, own[i], rank[i], tuple(ids[:k]), tuple(top_logprobs[i][:k]))
        for i, (token_id, ids, k) in enumerate(
            zip(token_ids.tolist(), top.tolist(), num_top, strict=True)
        )
    ]


def top_token_ids(logits: torch.Tensor, k: int) -> npt.NDArray[np.int64]:
    """The k best tokens of each line, [n, k]; among equal logits the lowest ids, in order.

    `torch.topk` does not define which of several equal values it returns; its choice may depend on
    k, and so on other rows. So only its k-th value is used, and tokens that reach it are sorted.
    """
    if k == 0:
        return np.empty((logits.shape[0], 0), dtype=np.int64)
    cutoff = logits.topk(k, dim=1).values[:, -1:]
    reach = ~(logits < cutoff).cpu().numpy()
    lines, token_ids = np.divmod(np.flatnonzero(reach), logits.shape[1])
    device = logits.device
    reached = logits[torch.from_numpy(lines).to(device), torch.from_numpy(token_ids).to(device)]
    order = np.lexsort((token_ids, -reached.cpu().numpy(), lines))
    first_of_line = np.searchsorted(lines, np.arange(logits.shape[0]))  # lines ascend
    best: npt.NDArray[np.int64] = token_ids[order][first_of_line[:, None] + np.arange(k)]
    return best
