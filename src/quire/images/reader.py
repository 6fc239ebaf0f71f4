"""Reads the images of prompts in threads, within bounds on their number, tokens and memory.

Fetching waits in threads of its own, so that slow hosts don't keep others from being decoded.
Called by the server's chat APIs, whose event loop awaits the futures, and by the offline API.
"""

import os
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from quire.core.sampling_params import ModelLimits
from quire.errors import InvalidRequestError, UploadsFullError
from quire.images.decode import check_image, decode_image
from quire.images.image_options import ImageOptions
from quire.images.placing import Placeholder, PromptImages, place_images
from quire.images.processors.processor import ImageProcessor, Layout, ProcessedImage
from quire.images.sources import ImageSources, is_remote
from quire.images.video import check_video, decode_video
from quire.images.wrong_media import VIDEO

MAX_PROMPT_BYTES = 192 << 20
"""Bytes of the encoder's inputs of one prompt: 64 tiles of 512 x 512 pixels. A message to an engine
holds them, so they are less than `ipc.MAX_MESSAGE_BYTES`."""

MAX_HELD_BYTES = 2 << 30
"""Bytes of the encoder's inputs of all open calls of a server."""

_FETCHING_THREADS = 8
_MOST_DECODING_THREADS = 4


class GivenImage(NamedTuple):
    """An image or a video as a caller gives it."""

    #: Its place in the call, for errors, which blame the field before its first bracket.
    where: str
    #: A URL, or a picture of Pillow or an array in the offline API; for a video, frames of these.
    source: Any
    is_video: bool = False

    @property
    def name(self) -> str:
        """Its place in the call; for a video, after the prefix `wrong_media.VIDEO`."""
        return VIDEO + self.where if self.is_video else self.where


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
        changed: Callable[[Mapping[str, Any]], ImageProcessor] | None = None,
    ) -> None:
        """token_id(text): the id of a special token; or None.
        Calls `changed` for the processor with a prompt's settings. It is None if prompts have none.
        sources: None means those that the options allow. max_held_bytes: bound of the bytes of all
        open calls; None means no bound. Raises ValueError for tokens that are missing, or that
        are not those of the encoder."""
        self.processor = processor
        self._changed = changed
        #: The last settings of a prompt, as text, and the processor with these.
        self._last_changed = "", processor
        self.max_images = options.max_images
        self.max_videos = 0 if processor.video is None else options.max_videos
        ids = tuple(_known(token_id, text) for text in processor.span_tokens)
        if processor.encoder_ids and ids != processor.encoder_ids:
            raise ValueError(
                f"the tokenizer has the ids {ids} for {', '.join(processor.span_tokens)}, but the"
                f" model's encoder takes {processor.encoder_ids}"
            )
        self.span_ids: Collection[int] = frozenset(ids)
        #: The placeholder of images and, if the model takes videos, that of videos.
        self.placeholders: list[Placeholder] = []
        self._add_placeholder(token_id, processor.placeholder, "images")
        if processor.video is not None:
            self._add_placeholder(token_id, processor.video.placeholder, "videos")
        self._sources = sources or ImageSources(options)
        self._held = _HeldBytes(max_held_bytes)
        num_decoding = max(1, min(_MOST_DECODING_THREADS, (os.cpu_count() or 2) // 2))
        self._decoding = ThreadPoolExecutor(num_decoding, "quire-image")
        self._fetching = ThreadPoolExecutor(_FETCHING_THREADS, "quire-fetch")

    def open_call(
        self, limits: ModelLimits, settings: Mapping[str, Any] | None = None
    ) -> "ImageCall":
        """The images of one prompt, for a model with these limits. settings: replacements for
        settings of the processor. Raises InvalidRequestError for unknown names."""
        return ImageCall(self, limits, self.processor_with(settings or {}))

    def processor_with(self, settings: Mapping[str, Any]) -> ImageProcessor:
        """The processor with a prompt's settings, which reads the model's files for new ones.
        Raises InvalidRequestError for settings that it does not read or obey."""
        if not settings:
            return self.processor
        assert self._changed is not None, "the reader of a model's files reads settings"
        name, processor = self._last_changed  # read once, since another thread may change it
        if name != repr(settings):
            processor = self._changed(settings)
            self._last_changed = repr(settings), processor
        return processor

    def check_count(self, given: Sequence[GivenImage], param: str) -> None:
        """Raise InvalidRequestError for more images or videos than one prompt may have, and for
        videos if the model takes none."""
        num_videos = sum(each.is_video for each in given)
        if num_videos and self.processor.video is None:
            raise InvalidRequestError(
                "the prompt has a video, but this model takes images only; send its frames as"
                " images",
                param,
            )
        for what, count, most in (
            ("images", len(given) - num_videos, self.max_images),
            ("videos", num_videos, self.max_videos),
        ):
            if count > most:
                raise InvalidRequestError(
                    f"the prompt has {count} {what}, but may have at most {most}"
                    " (limit_mm_per_prompt)",
                    param,
                )

    def _add_placeholder(self, token_id: Callable[[str], int | None], text: str, what: str) -> None:
        self.placeholders.append(Placeholder(text, _known(token_id, text), what))

    def close(self) -> None:
        """End the threads, and cancel the images that wait for one."""
        self._decoding.shutdown(wait=False, cancel_futures=True)
        self._fetching.shutdown(wait=False, cancel_futures=True)


class ImageCall:
    """The images of one prompt. Their bytes count in the reader's budget until this object, which
    `PromptImages.held` refers to, is collected."""

    def __init__(self, reader: ImageReader, limits: ModelLimits, processor: ImageProcessor) -> None:
        self._reader = reader
        self._processor = processor
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

    def texts(self, images: Sequence[ProcessedImage]) -> list[tuple[str, str]]:
        """The placeholder of each image, and the text that replaces the placeholder."""
        placeholders = self._reader.placeholders
        return [(placeholders[image.is_video].text, image.text) for image in images]

    def _fetch(self, image: GivenImage) -> ProcessedImage:
        data = self._reader._sources.read(image.source, image.name)
        return self._reader._decoding.submit(self._process, image, data).result()

    def _process(self, image: GivenImage, source: Any) -> ProcessedImage:
        """Decode and process an image. source: a URL that needs no waiting, bytes, or a picture."""
        if isinstance(source, str):
            source = self._reader._sources.read(source, image.name)
        param = image.where.partition("[")[0]
        try:
            if image.is_video:
                return self._process_video(image, source)
            is_file = isinstance(source, bytes)
            picture = (decode_image if is_file else check_image)(source, image.where)
            # Check what it costs before the memory is taken.
            self._reserve(self._processor.layout(*picture.size), image)
            return self._processor.process(picture)
        except InvalidRequestError as error:
            error.param = error.param or param
            raise

    def _process_video(self, image: GivenImage, source: Any) -> ProcessedImage:
        """Decode, sample and process a video."""
        processor = self._processor.video
        assert processor is not None, "check_count has refused it"
        is_file = isinstance(source, bytes)
        video = (decode_video if is_file else check_video)(source, image.name)
        places = processor.sample(len(video.frames), video.fps)
        frames = [video.frames[place] for place in places]
        self._reserve(processor.layout(len(frames), *frames[0].size), image)
        return processor.process(frames, places, video.fps)._replace(is_video=True)

    def _reserve(self, layout: Layout, image: GivenImage) -> None:
        limits, what = self._limits, "video" if image.is_video else "image"
        if layout.tokens_of_item > limits.max_content_tokens:
            raise InvalidRequestError(
                f"the {what} {image.where} takes {layout.tokens_of_item} tokens at once, but the"
                f" model takes {limits.max_content_tokens} at most; make it smaller"
            )
        if layout.num_tokens >= limits.max_model_len:
            raise InvalidRequestError(
                f"the {what} {image.where} takes {layout.num_tokens} tokens, but max_model_len is"
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
    """The bytes that one call holds. They count in the bytes that all calls hold."""

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
