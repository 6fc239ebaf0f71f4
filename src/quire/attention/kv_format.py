"""The interface of a KV format: how the keys and values of a layer are stored.

Each vector (a token's key or value in one KV head) is encoded by itself. So nothing is rewritten
when a block fills, and all chunkings of a prompt store the same bytes. The torch backend reads and
writes any format by `encode` and `decode`; kernels know the names of the formats that they read.

Shapes: D elements of a vector.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from quire.kernels.quantize import rotate_blocks

Arrays = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
"""The dtype and the shape of each array that stores a vector."""


class VectorFormat(ABC):
    """How one vector is stored: as a few small arrays, such as codes and a scale."""

    #: The dtype of the first array, which has the vector's elements.
    dtype: torch.dtype

    @abstractmethod
    def arrays(self, head_dim: int) -> Arrays:
        """The arrays that store a vector of `head_dim` elements."""

    @abstractmethod
    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x [..., D] of any floating dtype -> the arrays, [..., *shape] each."""

    @abstractmethod
    def decode(self, *arrays: torch.Tensor) -> torch.Tensor:
        """The arrays -> the vectors [..., D] fp32 that attention reads."""

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D] -> the vectors as they are read from pages."""
        return self.decode(*self.encode(x))

    def num_bytes(self, head_dim: int) -> int:
        """The number of bytes that a vector takes."""
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.arrays(head_dim))


@dataclass(frozen=True, slots=True)
class Plain(VectorFormat):
    """A vector's elements in one floating dtype."""

    dtype: torch.dtype

    def arrays(self, head_dim: int) -> Arrays:
        return ((self.dtype, (head_dim,)),)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.to(self.dtype),)

    def decode(self, *arrays: torch.Tensor) -> torch.Tensor:
        return arrays[0].float()


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How keys and values are stored. A latent layer stores its vectors as keys, not rotated."""

    #: The name by which the format is registered. A plain format has the name of its dtype.
    name: str
    keys: VectorFormat
    values: VectorFormat
    #: Whether keys and queries are multiplied by the matrix of `rotate_vectors` first.
    rotates_keys: bool = False

    @classmethod
    def plain(cls, dtype: torch.dtype) -> "KVFormat":
        """K and V in one floating dtype, without scales."""
        return cls(str(dtype).removeprefix("torch."), Plain(dtype), Plain(dtype))

    def vectors(self, *, is_latent: bool) -> tuple[VectorFormat, ...]:
        """The formats of the vectors that are stored for a token and KV head."""
        return (self.keys,) if is_latent else (self.keys, self.values)

    def rounded_keys(self, k: torch.Tensor) -> torch.Tensor:
        """Keys [..., D] -> the keys as they are read from pages, rotated back."""
        if not self.rotates_keys:
            return self.keys.rounded(k)
        return rotate_vectors(self.keys.rounded(rotate_vectors(k)))


def rotate_vectors(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] of any floating dtype -> fp32, each vector times an orthonormal Hadamard matrix.

    The matrix has n rows, where n is the greatest power of two that divides D, and multiplies each
    group of n elements. It is symmetric and its own inverse. Passes combine pairs of elements at
    distances of 1, 2, 4, .. in this order, so that all backends get the same bits.
    """
    size = x.shape[-1] & -x.shape[-1]
    return rotate_blocks(x, size) * (1.0 / math.sqrt(size))
