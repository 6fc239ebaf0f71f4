"""What transformers says of tokens that we generated greedily."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

NEAR_TIE = 1e-4
"""A difference counts as a near-tie only where the reference's two best logits lie within this."""


@torch.inference_mode()
def assert_greedy(
    model: PreTrainedModel, prompt: Sequence[int], output: Sequence[int], what: str
) -> int:
    """Assert that each output token is the reference's own choice after those before it.

    Equal to comparing with `generate`, but shows the logits where it fails. A near-tie is printed;
    returns how many there were.
    """
    token_ids = torch.tensor([[*prompt, *output]])
    logits = model(token_ids).logits[0, len(prompt) - 1 : -1].float()
    best = logits.topk(2, dim=-1)
    num_ties = 0
    for index, token_id in enumerate(output):
        if token_id == int(best.indices[index, 0]):
            continue
        gap = float(best.values[index, 0] - best.values[index, 1])
        is_second = token_id == int(best.indices[index, 1])
        assert is_second and gap <= NEAR_TIE, (
            f"{what}: output token {index} is {token_id}, transformers' is"
            f" {int(best.indices[index, 0])} (its two best logits lie {gap:.2e} apart)"
        )
        print(f"near-tie in {what}: output token {index}, logits {gap:.2e} apart")
        num_ties += 1
    return num_ties
