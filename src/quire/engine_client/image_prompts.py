"""Reads the images of prompts for engines of the caller's own: `LLM` and `AsyncLLM`.

Also finds out whether a model takes images, for these engines and the server.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.core.sampling_params import ModelLimits
from quire.engine_client.inputs import PromptInput
from quire.errors import CheckpointError, InvalidRequestError
from quire.images.image_options import ImageOptions
from quire.images.placing import expand_token_ids, replace_placeholders
from quire.images.processors.find import find_processor
from quire.images.reader import GivenImage, ImageReader
from quire.observability import log
from quire.text.chat_encoding import ImageMessages, encode_chat
from quire.text.chat_template import ChatTemplate
from quire.text.image_parts import has_images, media_roles, take_images
from quire.text.tokenizer import Tokenizer

logger = log.get_logger(__name__)


def make_reader(
    folder: Path, options: ImageOptions, tokenizer: Tokenizer, *, max_held_bytes: int | None = None
) -> ImageReader | None:
    """The reader of images for the model in a folder; None if it takes text only.

    max_held_bytes: see `ImageReader`. A processor whose settings can't be obeyed is logged, and the
    model is then served for text.
    """

    def special_id(text: str) -> int | None:
        return next(iter(tokenizer.special_ids_of([text])), None)

    try:
        processor = find_processor(folder)
        if processor is None:
            return None
        return ImageReader(processor, options, special_id, max_held_bytes=max_held_bytes)
    except (CheckpointError, ValueError) as error:
        logger.warning("no images are taken: %s", error)
        return None


class ImagePrompts:
    """The images in the prompts of one engine. Threads may share it."""

    def __init__(
        self, reader: ImageReader | None, tokenizer: Tokenizer | None, limits: ModelLimits
    ) -> None:
        """reader: None if the model takes text only."""
        takes_images = limits.max_content_tokens > 0 and tokenizer is not None
        self._reader = reader if takes_images else None
        self._tokenizer = tokenizer
        self._limits = limits

    def read(self, given: PromptInput) -> PromptInput:
        """The prompt, with its images placed in its tokens. Raises InvalidRequestError."""
        if not given.pictures:
            return given
        pictures = [
            GivenImage(f"multi_modal_data[{at}]", *each) for at, each in enumerate(given.pictures)
        ]
        reader, tokenizer = self._checked(pictures)
        call = reader.open_call(self._limits)
        images = call.read_all(pictures)
        if isinstance(given.prompt, str):
            text, images = replace_placeholders(given.prompt, reader.placeholders, images)
            token_ids = tokenizer.encode(text)
        else:
            token_ids, images = expand_token_ids(
                given.prompt,
                reader.placeholders,
                images,
                lambda text: tokenizer.encode(text, add_special_tokens=False),
            )
        return given._replace(prompt=token_ids, pictures=(), images=call.place(token_ids, images))

    def render(
        self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> PromptInput:
        """The prompt of a conversation. Its text gets no special tokens but the template's.

        options: those of `encode_chat`. Raises InvalidRequestError.
        """
        assert self._tokenizer is not None, "the caller checked it"
        reader = self._reader
        if reader is None or not has_images(messages):
            return PromptInput(
                encode_chat(template, self._tokenizer, messages, **options).token_ids
            )
        # First, take the images out of the messages and read them.
        has_tools = bool(options.get("tools"))
        roles = media_roles(template, reader.placeholders, has_tools=has_tools)
        messages, taken = take_images(messages, roles, None)
        pictures = [GivenImage(*each) for each in taken]
        reader.check_count(pictures, "messages")
        call = reader.open_call(self._limits)
        images = call.read_all(pictures)
        # Then render the messages, and find the images' places.
        marked = ImageMessages(messages, call.texts(images))
        token_ids = encode_chat(template, self._tokenizer, marked, **options).token_ids
        return PromptInput(token_ids, images=call.place(token_ids, images))

    def _checked(self, pictures: Sequence[GivenImage]) -> tuple[ImageReader, Tokenizer]:
        if self._reader is None or self._tokenizer is None:
            raise InvalidRequestError(
                "multi_modal_data has images, but the model takes text; leave them out",
                "multi_modal_data",
            )
        self._reader.check_count(pictures, "multi_modal_data")
        return self._reader, self._tokenizer


def no_images(given: PromptInput) -> PromptInput:
    """The prompt. Raises InvalidRequestError if it has images."""
    if given.pictures:
        raise InvalidRequestError(
            "multi_modal_data has images, but this call takes text only; leave them out",
            "multi_modal_data",
        )
    return given
