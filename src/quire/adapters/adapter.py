"""A LoRA adapter in main memory: the factors A and B by linear, and a digest.

    y = W x + scaling * B (A x)

(Hu et al., arXiv:2106.09685.) Made by `peft_folder.py`; loaded into slots by `slots.py`.

Shapes: r rank, I inputs and O outputs of a linear in the model's files.
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
    """The adapter's weights for one linear."""

    #: [r, I], of any floating dtype.
    a: torch.Tensor
    #: [O, r], of any floating dtype.
    b: torch.Tensor
    #: The number that multiplies the product of `b` and `a`.
    scaling: float

    @property
    def rank(self) -> int:
        """The rank r."""
        return len(self.a)

    @property
    def transposed(self) -> "LoRAWeights":
        """The weights for the transposed linear, as views of the same tensors."""
        return LoRAWeights(self.b.T, self.a.T, self.scaling)


@dataclass(frozen=True, eq=False)
class LoRAAdapter:
    """An adapter's weights in main memory."""

    #: The folder that the adapter was read from, for messages.
    name: str
    #: The weights by a linear's path in transformers' model: "model.layers.0.self_attn.q_proj".
    weights: Mapping[str, LoRAWeights]
    #: Indices of the layers that the config's layers_to_transform lists; empty if it lists none.
    layers: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of all the adapter's tensors."""
        return sum(each.a.nbytes + each.b.nbytes for each in self.weights.values())

    @cached_property
    def digest(self) -> str:
        """A hash, in hexadecimal, of the weights, their paths and scalings.

        Adapters with equal digests give equal results. The folder's name is not part of the hash.
        """
        found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for path, each in sorted(self.weights.items()):
            for tensor in (each.a, each.b):
                facts = [path, each.scaling.hex(), str(tensor.dtype), *tensor.shape]
                found.update(json.dumps(facts).encode())
                found.update(tensor.contiguous().view(torch.uint8).numpy().data)
        return found.hexdigest()
