"""The interface of a tower, the encoder that turns one image into embeddings.

A tower encodes one content at a time. Its work is cut into slices, between which the engine runs
steps. The cuts depend on the content's size alone, so the bits of a result depend neither on the
time between two slices nor on other requests.

To add a tower, add a file with its config and modules, and a line in `towers.py`.

Legend: T embeddings of the content, P patches of the content, H hidden size of the language model.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any, Self, TypeVar, Unpack

import torch

from quire.errors import CheckpointError, shown
from quire.layers.operator_module import OperatorModule
from quire.layers.storage import Storage

T = TypeVar("T")

Slices = Generator[None, None, T]
"""Work that yields between its slices, and returns its result at the end.

A generator inside a tower is run by `result = yield from slices`.
"""

Grid = tuple[int, int, int]
"""Frames, rows and columns of patches, before an encoder merges any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig(ABC):
    """The config of a tower and of the connector after it."""

    #: Number of elements of an embedding of the language model.
    output_size: int
    #: Names of the fields of config.json that were ignored because no model reads them.
    left_out: tuple[str, ...] = ()

    @classmethod
    @abstractmethod
    def from_hf(cls, raw: Mapping[str, Any], output_size: int) -> Self:
        """Read the contents of config.json, with its `vision_config`.

        Ignores the fields of the language model. Raises UnsupportedModelError for an unsupported
        field or value, and CheckpointError for a missing or malformed one.
        """


def vision_config_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The `vision_config` in the contents of config.json. Raises CheckpointError without one."""
    found = raw.get("vision_config")
    if not isinstance(found, dict):
        raise CheckpointError(
            f"config.json has the vision_config {shown(found)}, but it must be an object, which"
            " describes the encoder of images"
        )
    return found


class VisionTower(OperatorModule, ABC):
    """An encoder of contents, with the connector to the language model.

    Invariant: the result of `encode` is a function of its arguments and of the weights. A tower
    that encodes one content must not be asked to encode another before the first has ended.
    """

    #: 1 + the number of layers of the language model that get features of their own (DeepStack).
    num_parts: int = 1
    #: The `sections` of `layers.rotary.AxisRotations` for the language model; None if its rotary
    #: positions have one axis.
    rotary_sections: tuple[int, int, int] | None = None
    #: Maximum number of embeddings of one content.
    max_content_tokens: int

    @abstractmethod
    def __init__(self, config: VisionConfig, **storage: Unpack[Storage]) -> None:
        """`config` has the tower's type."""
        super().__init__()

    def use_embedding(self, embed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Look up tokens of text that stand inside of contents, before the first is encoded.

        `embed` is the language model's. It may be a collective: all ranks call this at the same
        time, those without weights on a tower on the meta device. Other towers ignore it.
        """

    @abstractmethod
    def num_tokens(self, shape: tuple[int, ...], grid: Grid) -> int:
        """Number of embeddings [T] of a content of this shape and grid.

        Raises InvalidRequestError for a shape or grid that the tower can't encode.
        """

    @abstractmethod
    def largest_content(self, max_tokens: int) -> tuple[tuple[int, ...], Grid]:
        """The shape and grid of about the largest content in a prompt of `max_tokens`."""

    def most_square_side(self, max_tokens: int) -> int:
        """The largest side of a square of embeddings in a prompt of `max_tokens`."""
        return isqrt(max(1, min(self.max_content_tokens, max_tokens)))

    def span_grid(self, grid: Grid) -> Grid | None:
        """Frames, rows and columns of the embeddings of a content of this grid.

        None if the language model's rotary positions have one axis.
        """
        return None

    @abstractmethod
    def encode(self, values: torch.Tensor, grid: Grid) -> Slices[torch.Tensor]:
        """Encode one content of fp32 values -> [T, num_parts * H] in the language model's dtype.

        `values` have a shape that `num_tokens` accepts, and may not change before the end. They are
        [3, height, width] or, for towers of flattened patches, [P, elements of a patch]. Runs in
        inference mode: the caller resumes the generator within `torch.inference_mode()`.
        """


def finish(slices: Slices[T]) -> T:
    """Run all slices at once, and return the result."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            found: T = end.value
            return found
