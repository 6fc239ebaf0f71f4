"""A LoRA adapter in main memory: what it adds to a model's linears, and its digest.

    y = W x + scaling * B (A x)

(Hu et al., arXiv:2106.09685.) Made by `peft_folder.py`; put in place by `slots.py`.

Shapes: r rank, I inputs and O outputs of a linear, as the model's files have it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class LoRAWeights:
    """Of one linear. a: [r, I], b: [O, r], of any floating dtype; scaling multiplies their
    product."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    @property
    def rank(self) -> int:
        """r."""
        return len(self.a)

    @property
    def transposed(self) -> "LoRAWeights":
        """Of the transposed linear: views of the same tensors."""
        return LoRAWeights(self.b.T, self.a.T, self.scaling)


@dataclass(frozen=True, eq=False)
class LoRAAdapter:
    """weights: by the linears' paths in transformers' model, as "model.layers.0.self_attn.q_proj".
    name: for messages: the folder that it was read from. layers: numbers of layers that its config
    names beside."""

    name: str
    weights: Mapping[str, LoRAWeights]
    layers: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        """The largest of its linears'."""
        return max(each.rank for each in self.weights.values())

    @property
    def num_bytes(self) -> int:
        """Of all its tensors."""
        return sum(each.a.nbytes + each.b.nbytes for each in self.weights.values())

    @cached_property
    def digest(self) -> str:
        """Of all that determines what it adds, in hexadecimal: two adapters with the same one add
        the same, whatever their folders are called."""
        found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for path, each in sorted(self.weights.items()):
            for tensor in (each.a, each.b):
                facts = [path, each.scaling.hex(), str(tensor.dtype), *tensor.shape]
                found.update(json.dumps(facts).encode())
                found.update(tensor.contiguous().view(torch.uint8).numpy().data)
        return found.hexdigest()
