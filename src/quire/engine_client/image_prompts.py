"""Reads the images of prompts for engines of the caller's own: `LLM` and `AsyncLLM`.

Also finds out whether a model takes images, for these engines and the server.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from quire.core.sampling_params import ModelLimits
from quire.engine_client.inputs import PromptInput
from quire.errors import CheckpointError, ConfigurationError, InvalidRequestError
from quire.images.image_options import ImageOptions
from quire.images.placing import expand_token_ids, replace_placeholders
from quire.images.processors.find import find_processor
from quire.images.processors.processor import ImageProcessor
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
    model is then served for text. Raises ConfigurationError if an option asks for images.
    """
    given = {"mmproj": options.mmproj, "mm_processor_kwargs": options.mm_processor_kwargs or None}
    asked = [f"{name} is {value!r:.200}" for name, value in given.items() if value is not None]

    def special_id(text: str) -> int | None:
        return next(iter(tokenizer.special_ids_of([text])), None)

    try:
        processor = find_processor(folder, options.mmproj, options.mm_processor_kwargs)
        if processor is None and options.mm_processor_kwargs:
            raise CheckpointError("the model takes text only")
        if processor is None:
            return None
        return ImageReader(
            processor,
            options,
            special_id,
            max_held_bytes=max_held_bytes,
            changed=partial(_changed_processor, folder, options),
        )
    except (CheckpointError, ValueError) as error:
        if asked:
            raise ConfigurationError(
                f"{' and '.join(asked)}, but no images can be taken: {error}; leave it out to serve"
                " the model without it"
            ) from error
        logger.warning("no images are taken: %s", error)
        return None


def _changed_processor(
    folder: Path, options: ImageOptions, settings: Mapping[str, Any]
) -> ImageProcessor:
    """The processor with settings of a prompt. Raises InvalidRequestError."""
    try:
        merged = {**(options.mm_processor_kwargs or {}), **settings}
        found = find_processor(folder, options.mmproj, merged)
    except (CheckpointError, ValueError) as error:
        raise InvalidRequestError(
            f"mm_processor_kwargs is {dict(settings)!r:.200}, but {error}", "mm_processor_kwargs"
        ) from error
    assert found is not None, "the model's files gave a processor before"
    return found


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
            check_settings(self._reader, given.picture_settings)
            return given
        pictures = [GivenImage(*each) for each in given.pictures]
        reader, tokenizer = self._checked(pictures)
        call = reader.open_call(self._limits, given.picture_settings)
        images = call.read_all(pictures)
        if given.render is not None:
            token_ids = given.render(call.texts(images))
        elif isinstance(given.prompt, str):
            text, images = replace_placeholders(given.prompt, reader.placeholders, images)
            token_ids = tokenizer.encode(text)
        else:
            token_ids, images = expand_token_ids(
                given.prompt,
                reader.placeholders,
                images,
                lambda text: tokenizer.encode(text, add_special_tokens=False),
            )
        placed = call.place(token_ids, images)
        return given._replace(prompt=token_ids, pictures=(), render=None, images=placed)

    def render(
        self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> PromptInput:
        """The prompt of a conversation, whose images `read` reads. Its text gets no special tokens
        but the template's.

        options: those of `encode_chat`. Raises InvalidRequestError.
        """
        tokenizer, reader = self._tokenizer, self._reader
        assert tokenizer is not None, "the caller checked it"
        if reader is None or not has_images(messages):
            return PromptInput(encode_chat(template, tokenizer, messages, **options).token_ids)
        has_tools = bool(options.get("tools"))
        roles = media_roles(template, reader.placeholders, has_tools=has_tools)
        messages, taken = take_images(messages, roles, None)
        reader.check_count([GivenImage(*each) for each in taken], "messages")

        def token_ids_with(texts: Sequence[tuple[str, str]]) -> list[int]:
            marked = ImageMessages(messages, texts)
            return encode_chat(template, tokenizer, marked, **options).token_ids

        return PromptInput([], pictures=tuple(taken), render=token_ids_with)

    def _checked(self, pictures: Sequence[GivenImage]) -> tuple[ImageReader, Tokenizer]:
        if self._reader is None or self._tokenizer is None:
            raise InvalidRequestError(
                "multi_modal_data has images, but the model takes text; leave them out",
                "multi_modal_data",
            )
        self._reader.check_count(pictures, "multi_modal_data")
        return self._reader, self._tokenizer


def check_settings(reader: ImageReader | None, settings: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError for settings that images of a prompt could not have. `reader` is
    None for models and calls that take text only."""
    if settings and reader is None:
        raise InvalidRequestError(
            f"mm_processor_kwargs is {dict(settings)!r:.200}, but only text is taken here, which"
            " has no such settings; leave it out",
            "mm_processor_kwargs",
        )
    if reader is not None:
        reader.processor_with(settings)


def no_images(given: PromptInput) -> PromptInput:
    """The prompt. Raises InvalidRequestError if it has images or settings of images."""
    check_settings(None, given.picture_settings)
    if given.pictures:
        raise InvalidRequestError(
            "multi_modal_data has images, but this call takes text only; leave them out",
            "multi_modal_data",
        )
    return given
