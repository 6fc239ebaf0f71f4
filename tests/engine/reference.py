"""What transformers says of tokens that we generated greedily."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

NEAR_TIE = 1e-4
"""A difference counts as a near-tie only where the reference's two best logits lie within this."""


class Reference:
    """A model of transformers, which computes the logits of equal tokens once."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, V] in fp32."""
        key = tuple(token_ids)
        if key not in self._logits:
            self._logits[key] = self.model(torch.tensor([key])).logits[0].float()
        return self._logits[key]


def assert_greedy(
    reference: Reference, prompt: Sequence[int], output: Sequence[int], what: str
) -> int:
    """Assert that each output token is the reference's own choice after those before it.

    Equal to comparing with `generate`, but shows the logits where it fails. A near-tie is printed;
    returns how many there were.
    """
    logits = reference.logits([*prompt, *output])[len(prompt) - 1 : -1]
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
