"""The interface of image processors, and the results that they return."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING, NamedTuple

from quire.core.content_spans import Content
from quire.images.processors.pixels import Normalizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image


_PIECE = 1 << 18
"""How many numbers are copied at once; this takes less than 1 ms."""


class Item(NamedTuple):
    """One input of the encoder, and its place in the prompt's text."""

    content: Content
    #: Number of consecutive tokens of the prompt that stand for the content.
    num_tokens: int
    #: Frames, rows and columns of the content's embeddings; None if rotary positions have one axis.
    grid: tuple[int, int, int] | None = None


class ProcessedImage(NamedTuple):
    """One image or video of a prompt."""

    #: The text that replaces the image's placeholder.
    text: str
    #: The contents in the order of the text.
    items: tuple[Item, ...]
    #: Whether it is a video, which has its own placeholder in the prompt.
    is_video: bool = False


class Layout(NamedTuple):
    """The cost of an image, known by its size alone."""

    #: Number of tokens of the largest content of the image.
    tokens_of_item: int
    #: Number of tokens of all contents of the image.
    num_tokens: int
    #: Bytes of all contents' values.
    num_bytes: int


class VideoProcessor(ABC):
    """Turns the frames of videos into contents for one model. Immutable, so threads may share
    it."""

    #: The text that the chat template writes for a video. The spans of frames repeat its token.
    placeholder: str

    @abstractmethod
    def sample(self, num_frames: int, fps: float) -> list[int]:
        """The indices of the frames that the model reads. The video has `num_frames` frames, `fps`
        per second. Raises InvalidRequestError for a video that the model can't read."""

    @abstractmethod
    def layout(self, num_frames: int, width: int, height: int) -> Layout:
        """The cost of this number of sampled frames. Raises InvalidRequestError for a shape that
        the model can't read."""

    @abstractmethod
    def process(
        self, frames: "Sequence[Image]", places: Sequence[int], fps: float
    ) -> ProcessedImage:
        """Resize and normalize sampled RGB frames of one size. `places` are the frames' indices
        from `sample`."""


class ImageProcessor(ABC):
    """Turns pictures into contents for one model. Immutable, so threads may share it."""

    #: The processor of videos; None if the model takes none.
    video: VideoProcessor | None = None

    #: The text that the chat template writes for an image.
    placeholder: str
    #: Texts of the special tokens that fill the spans of a prompt.
    span_tokens: tuple[str, ...]
    #: The ids that the model's encoder expects for `span_tokens`; empty if it expects no ids.
    encoder_ids: tuple[int, ...] = ()

    _normalize: Normalizer
    #: The filter of resizes, see `pixels.resize`.
    _resample: int

    @property
    def identity(self) -> tuple[object, ...]:
        """The settings that change a content's values or its embeddings, for digests."""
        return self._normalize.identity, self._resample

    @abstractmethod
    def layout(self, width: int, height: int) -> Layout:
        """The cost of a picture of this size, in pixels. Raises InvalidRequestError for a shape
        that the model can't read."""

    @abstractmethod
    def process(self, image: "Image") -> ProcessedImage:
        """Resize and normalize an RGB picture."""

    def content(
        self, values: "NDArray[np.float32]", grid: tuple[int, int, int] = (1, 1, 1)
    ) -> Content:
        """A content of these values, with the digest that names it.

        The digest is a hash of the values, their shape and grid, and the processor's identity as
        the key. Two contents of one model have one digest only if their embeddings are equal.
        """
        shape = tuple(values.shape)
        key = hashlib.blake2b(repr((type(self).__name__, *self.identity)).encode()).digest()
        digest = hashlib.blake2b(key=key, digest_size=16)
        digest.update(repr((shape, grid)).encode())
        data = _bytes_of(values)
        digest.update(data)
        return Content(digest.hexdigest(), shape, data, grid)


def _bytes_of(values: "NDArray[np.float32]") -> bytes:
    """The bytes of an array, copied in pieces: a copy holds the GIL, and the server's other threads
    must not wait for all of it."""
    import numpy as np  # a server for text never loads it

    file = BytesIO()
    flat = np.ascontiguousarray(values).reshape(-1)
    for at in range(0, len(flat), _PIECE):
        file.write(flat[at : at + _PIECE].data)
    return file.getvalue()
