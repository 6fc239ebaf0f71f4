"""The inputs of one attention layer in one step.

Layers hand them to an attention backend, or to the recorder of native programs;
`attention.interface` describes what backends do with them.

Shapes: T tokens of the step, Hq query heads, Hkv KV heads, D head size, Dv value size.
"""

from typing import NamedTuple

import torch

from quire.kernels.rotary import Rotation


class AttentionInputs(NamedTuple):
    """The tensors of an attention call. The call may overwrite q, k and v."""

    #: Queries of the step's tokens [T, Hq, D].
    q: torch.Tensor
    #: Keys of the step's tokens [T, Hkv, D], or a latent layer's vectors. None if an earlier call
    #: of this step with the same layer has written keys and values, as in models whose layers share
    #: them. Then only q is rotated.
    k: torch.Tensor | None
    #: Values of the step's tokens [T, Hkv, Dv]. None if k is None. Latent layers ignore the values.
    v: torch.Tensor | None
    #: The layer's learned logits [Hq], the same in every step, for specs with has_sinks; else None.
    sinks: torch.Tensor | None = None
    #: The norms and the rotation that attention applies to q and k first. None if it applies
    #: nothing. It is always None for latent layers, whose models rotate the elements after the
    #: value themselves: q = [absorbed q, rotated q], k = [latent, rotated k].
    rotation: Rotation | None = None
