"""Checks that a loaded model computes tokens independently of each other, except in attention.

Only such a model can compute tokens of several sequences, and parts of prompts, in one batch. The
check runs a few tokens in two orders: each token must have the same queries, keys, values and
hidden states in both. A model fails if it has a convolution over tokens or a recurrent state, or if
it counts positions instead of reading `positions`. Called by `model.py` after loading.
"""

import torch

from quire.attention.interface import AttentionSpec
from quire.errors import UnsupportedModelError
from quire.kernels.attention_inputs import AttentionInputs
from quire.models.interface import TextModel

NUM_TOKENS = 7
MOST_DIFFERENCE = 0.05
"""Largest allowed relative difference, by norm. Rounding in any dtype causes far smaller ones, and
values of another token far larger ones."""


class _Recorder:
    """An attention call that records its inputs. Each token attends only to itself."""

    def __init__(self, specs: tuple[AttentionSpec, ...]) -> None:
        self._specs = specs
        self.seen: list[torch.Tensor] = []

    def __call__(self, layer: int, inputs: AttentionInputs) -> torch.Tensor:
        q, k, v, _, _ = inputs
        assert k is not None and v is not None
        self.seen += [each.flatten(1).float() for each in (q, k, v)]
        spec = self._specs[layer]
        return v.repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1)


@torch.inference_mode()
def check_rows(model: TextModel, max_model_len: int) -> None:
    """Raises UnsupportedModelError if tokens depend on each other outside of attention."""
    device = next(model.parameters()).device
    count = min(NUM_TOKENS, max_model_len)
    positions = torch.arange(count, device=device)
    token_ids = (positions * 7919 + 11) % model.vocab_size
    order = torch.arange(count - 1, -1, -1, device=device)
    first, second = (
        _recorded_calls(model, token_ids[each], positions[each]) for each in (positions, order)
    )
    for one, other in zip(first, second, strict=True):
        difference = (one - other[order]).norm() / one.norm().clamp(min=1e-6)
        if not difference <= MOST_DIFFERENCE:
            raise UnsupportedModelError(
                "the class of transformers computes tokens that depend on each other outside of"
                f" attention (relative difference {float(difference):.2g}), so that it can't run"
                " with quire's attention; transformers itself runs the model"
            )


def _recorded_calls(
    model: TextModel, token_ids: torch.Tensor, positions: torch.Tensor
) -> list[torch.Tensor]:
    recorder = _Recorder(model.attention_specs)
    hidden = model(token_ids, positions, recorder)
    return [*recorder.seen, hidden.float()]
