"""Maps token ids between a model and a drafter whose vocabulary differs.

Rows have the model's token ids. The drafter computes the mapped ids, and its logits are moved to
the model's ids, so that a draft is sampled with the same noise as the model's token. Made by
`assembly.draft_vocabularies`, called by `draft_model` and `draft_batch`.
"""

from dataclasses import dataclass

import torch

from quire.runtime.block_tables import Int32, Int64


@dataclass(frozen=True, slots=True, eq=False)
class TokenPairs:
    """The ids of the tokens that two vocabularies have in common.

    Invariant: no id is in two pairs. The first two arrays are parallel.
    """

    #: [P]: the model's id of each pair.
    target_ids: Int64
    #: [P]: the drafter's id of each pair.
    own_ids: Int64
    #: [V]: for each id of the model, the drafter's id that is computed in its place. For an id
    #: without a pair, it stands for the end of the token's text.
    stand_ins: Int32

    def at_target_ids(self, logits: torch.Tensor) -> torch.Tensor:
        """The drafter's logits [R, D] at the model's ids: [R, V]. They are -inf for ids without a
        pair, which are not drafted."""
        found = torch.full((len(logits), len(self.stand_ins)), -torch.inf)
        found[:, torch.from_numpy(self.target_ids)] = logits[:, torch.from_numpy(self.own_ids)]
        return found
