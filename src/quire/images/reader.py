"""Reads the images of prompts in threads, within bounds on their number, tokens and memory.

Fetching waits in threads of its own, so that slow hosts don't keep others from being decoded.
Called by the server's chat APIs, whose event loop awaits the futures, and by the offline API.
"""

import os
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from quire.core.sampling_params import ModelLimits
from quire.errors import InvalidRequestError, UploadsFullError
from quire.images.decode import check_image, decode_image
from quire.images.image_options import ImageOptions
from quire.images.placing import PromptImages, place_images, replace_placeholders
from quire.images.processors.processor import ImageProcessor, Layout, ProcessedImage
from quire.images.sources import ImageSources, is_remote

MAX_PROMPT_BYTES = 192 << 20
"""Bytes of the encoder's inputs of one prompt: 64 tiles of 512 x 512 pixels. A message to an engine
holds them, so they are less than `ipc.MAX_MESSAGE_BYTES`."""

MAX_HELD_BYTES = 2 << 30
"""Bytes of the encoder's inputs of all open calls of a server."""

_FETCHING_THREADS = 8
_MOST_DECODING_THREADS = 4


class GivenImage(NamedTuple):
    """An image as a caller gives it."""

    #: Its place in the call, for errors, which blame the field before its first bracket.
    where: str
    #: A URL, or a picture of Pillow or an array in the offline API.
    source: Any


class ImageReader:
    """The images of one model's prompts. Threads may share it."""

    def __init__(
        self,
        processor: ImageProcessor,
        options: ImageOptions,
        token_id: Callable[[str], int | None],
        *,
        sources: ImageSources | None = None,
        max_held_bytes: int | None = None,
    ) -> None:
        """token_id(text): the id of a special token; or None.
        sources: None means those that the options allow. max_held_bytes: bound of the bytes of all
        open calls; None means no bound. Raises ValueError for tokens that are missing, or that
        are not those of the encoder."""
        self.processor = processor
        self.max_images = options.max_images
        ids = tuple(_known(token_id, text) for text in processor.span_tokens)
        if processor.encoder_ids and ids != processor.encoder_ids:
            raise ValueError(
                f"the tokenizer has the ids {ids} for {', '.join(processor.span_tokens)}, but the"
                f" model's encoder takes {processor.encoder_ids}"
            )
        self.span_ids: Collection[int] = frozenset(ids)
        self.placeholder_id = _known(token_id, processor.placeholder)
        self._sources = sources or ImageSources(options)
        self._held = _HeldBytes(max_held_bytes)
        num_decoding = max(1, min(_MOST_DECODING_THREADS, (os.cpu_count() or 2) // 2))
        self._decoding = ThreadPoolExecutor(num_decoding, "quire-image")
        self._fetching = ThreadPoolExecutor(_FETCHING_THREADS, "quire-fetch")

    def open_call(self, limits: ModelLimits) -> "ImageCall":
        """The images of one prompt, for a model with these limits."""
        return ImageCall(self, limits)

    def check_count(self, num_images: int, param: str) -> None:
        """Raise InvalidRequestError for more images than one prompt may have."""
        if num_images > self.max_images:
            raise InvalidRequestError(
                f"the prompt has {num_images} images, but may have at most {self.max_images}"
                " (limit_mm_per_prompt)",
                param,
            )

    def close(self) -> None:
        """End the threads, and cancel the images that wait for one."""
        self._decoding.shutdown(wait=False, cancel_futures=True)
        self._fetching.shutdown(wait=False, cancel_futures=True)


class ImageCall:
    """The images of one prompt. Their bytes count in the reader's budget until this object, which
    `PromptImages.held` refers to, is collected."""

    def __init__(self, reader: ImageReader, limits: ModelLimits) -> None:
        self._reader = reader
        self._limits = limits
        self._counted = _CallBytes(reader._held)
        weakref.finalize(self, self._counted.release)

    def submit(self, image: GivenImage) -> "Future[ProcessedImage]":
        """Read an image in a thread. The future raises InvalidRequestError and UploadsFullError."""
        reader = self._reader
        is_slow = isinstance(image.source, str) and is_remote(image.source)
        if not is_slow:
            return reader._decoding.submit(self._process, image, image.source)
        return reader._fetching.submit(self._fetch, image)

    def read_all(self, images: Sequence[GivenImage]) -> list[ProcessedImage]:
        """Read images and wait for them. Raises the errors of `submit`."""
        futures = [self.submit(image) for image in images]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def place(self, token_ids: Sequence[int], images: Sequence[ProcessedImage]) -> PromptImages:
        """The contents of a prompt whose placeholders were replaced. Raises
        InvalidRequestError."""
        return place_images(token_ids, images, self._reader.span_ids, self)

    def expand_text(self, text: str, images: Sequence[ProcessedImage]) -> str:
        """A text prompt with the texts of images in place of their placeholders. Raises
        InvalidRequestError."""
        texts = [image.text for image in images]
        return replace_placeholders(text, self._reader.processor.placeholder, texts)

    def _fetch(self, image: GivenImage) -> ProcessedImage:
        data = self._reader._sources.read(image.source, image.where)
        return self._reader._decoding.submit(self._process, image, data).result()

    def _process(self, image: GivenImage, source: Any) -> ProcessedImage:
        """Decode and process an image. source: a URL that needs no waiting, bytes, or a picture."""
        # First, read and decode it.
        if isinstance(source, str):
            source = self._reader._sources.read(source, image.where)
        if isinstance(source, bytes):
            picture = decode_image(source, image.where)
        else:
            picture = check_image(source, image.where)
        # Then check what it costs, before the memory is taken.
        param = image.where.partition("[")[0]
        try:
            self._reserve(self._reader.processor.layout(*picture.size), image.where)
            return self._reader.processor.process(picture)
        except InvalidRequestError as error:
            error.param = error.param or param
            raise

    def _reserve(self, layout: Layout, where: str) -> None:
        limits = self._limits
        if layout.tokens_of_item > limits.max_content_tokens:
            raise InvalidRequestError(
                f"the image {where} takes {layout.tokens_of_item} tokens, but the model takes"
                f" {limits.max_content_tokens} at most; make it smaller"
            )
        if layout.num_tokens >= limits.max_model_len:
            raise InvalidRequestError(
                f"the image {where} takes {layout.num_tokens} tokens, but max_model_len is"
                f" {limits.max_model_len}; make it smaller"
            )
        self._counted.add(layout.num_bytes)


class _HeldBytes:
    """The bytes that all calls hold."""

    def __init__(self, bound: int | None) -> None:
        self._bound = bound
        self._num_bytes = 0
        # Reentrant, since the collector may release a call while this thread holds the lock.
        self._lock = threading.RLock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            if self._bound is not None and self._num_bytes + num_bytes > self._bound:
                raise UploadsFullError(
                    "the images of all open calls together have reached the server's bound of"
                    f" {self._bound} bytes; retry, or send fewer or smaller images"
                )
            self._num_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes -= num_bytes


class _CallBytes:
    """The bytes of one call, part of those that all calls hold."""

    def __init__(self, held: _HeldBytes) -> None:
        self._held = held
        self._num_bytes = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            if self._num_bytes + num_bytes > MAX_PROMPT_BYTES:
                raise InvalidRequestError(
                    f"the images of the prompt have more than {MAX_PROMPT_BYTES} bytes of pixels"
                    " after resizing; send fewer or smaller ones"
                )
            self._held.add(num_bytes)
            self._num_bytes += num_bytes

    def release(self) -> None:
        self._held.release(self._num_bytes)
        self._num_bytes = 0


def _known(token_id: Callable[[str], int | None], text: str) -> int:
    found = token_id(text)
    if found is None:
        raise ValueError(f"the tokenizer has no token {text!r}, which images need")
    return found
