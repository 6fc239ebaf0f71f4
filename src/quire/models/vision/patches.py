"""The cutting and joining of patches, and their projection, which is stored as a convolution.

The convolution's stride is its kernel's size, so it is a linear over the flattened patches. Called
by the towers.

Shapes: P patches, E elements of a patch, H hidden size of the tower, T embeddings, O output size.
"""

from typing import Unpack

import torch

from quire.layers.linear import Linear, LinearKind, SlottedModule, WeightSlot
from quire.layers.storage import Storage

NUM_CHANNELS = 3
"""Red, green and blue."""

IMAGE_GRID = (1, 1, 1)
"""The grid of a content that is one array [3, height, width], since its shape gives the size."""


class PatchProjection(SlottedModule):
    """A linear over flattened patches, loaded from the weight [O, *kernel] of a convolution."""

    def __init__(
        self,
        name: str,
        kernel: tuple[int, ...],
        output_size: int,
        *,
        bias: bool,
        **storage: Unpack[Storage],
    ) -> None:
        """`name` is the attribute's name in the parent module, and so in the checkpoint.

        `kernel` are the sizes whose product is E, in the order of a patch's elements.
        """
        super().__init__()
        self._name = name
        self._kernel = kernel
        self.linear = Linear(
            torch.Size(kernel).numel(),
            (output_size,),
            LinearKind.REPLICATED,
            bias=bias,
            **storage,
        )

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        slots = {name: slot for (name, _), slot in self.linear.slots().items()}
        weight = slots["weight"]

        def load(first_row: int, rows: torch.Tensor) -> None:
            weight.load(first_row, rows.flatten(1))

        slots["weight"] = WeightSlot((weight.shape[0], *self._kernel), load)
        return {f"{self._name}.{name}": slot for name, slot in slots.items()}

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """patches [P, E] -> [P, O]."""
        projected: torch.Tensor = self.linear(patches)
        return projected


def to_patches(values: torch.Tensor, size: int) -> torch.Tensor:
    """Cut an image [channels, height, width] into patches, row by row: [P, channels * size * size].

    Height and width are multiples of `size`.
    """
    channels, height, width = values.shape
    cut = values.view(channels, height // size, size, width // size, size)
    return cut.permute(1, 3, 0, 2, 4).reshape(-1, channels * size * size)


def stack_squares(hidden: torch.Tensor, columns: int, factor: int) -> torch.Tensor:
    """Stack the patches of each square, row by row: [rows * columns, H] -> [T, factor**2 * H].

    Rows and columns are multiples of `factor`.
    """
    squares = hidden.view(-1, factor, columns // factor, factor, hidden.shape[1])
    return squares.transpose(1, 2).reshape(len(hidden) // factor**2, -1)
