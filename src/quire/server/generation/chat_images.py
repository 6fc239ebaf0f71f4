"""Reads the images of a chat call in threads, before its prompt is rendered."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.engine_client.image_prompts import check_settings
from quire.images.placing import NO_IMAGES, PromptImages
from quire.images.processors.processor import ProcessedImage
from quire.images.reader import GivenImage, ImageCall
from quire.server.generation.chat_call import ChatCall
from quire.server.service import Service
from quire.text.chat_encoding import ImageMessages
from quire.text.chat_messages import LeftOut, check_messages
from quire.text.image_parts import has_images, media_roles, take_images


@dataclass(frozen=True, slots=True)
class ChatImages:
    """The images of a chat call, and its messages with marks at the images' places."""

    messages: Sequence[Mapping[str, Any]]
    images: Sequence[ProcessedImage] = ()
    #: The call that the images' memory counts for; None without images.
    call: ImageCall | None = None
    #: Names of the parts' fields that have no effect.
    left_out: Sequence[str] = ()

    @property
    def texts(self) -> list[str]:
        """The texts that stand for the images in the prompt."""
        return [image.text for image in self.images]

    @property
    def to_encode(self) -> Sequence[Mapping[str, Any]] | ImageMessages:
        """The argument of `encode_chat`."""
        if self.call is None:
            return self.messages
        return ImageMessages(self.messages, self.call.texts(self.images))

    def placed(self, token_ids: Sequence[int]) -> PromptImages:
        """The images' places in the prompt. Raises InvalidRequestError."""
        return NO_IMAGES if self.call is None else self.call.place(token_ids, self.images)


async def read_images(service: Service, call: ChatCall, *, has_tools: bool) -> ChatImages:
    """Read the images of a call for a model that takes images; for other models, they are refused
    like other unknown parts.

    Raises InvalidRequestError for an image that can't be read, and UploadsFullError. If the call is
    cancelled, no further images are read.
    """
    if not has_images(call.messages):
        if call.picture_settings:
            await asyncio.to_thread(check_settings, service.image_reader, call.picture_settings)
        return ChatImages(call.messages)
    # First, take the images out of the messages, and refuse other unsupported parts. The length of
    # the texts is checked after this, since data: URLs of images are longer than allowed texts.
    left_out: LeftOut | None = None if service.unknown_fields == "refuse" else {}
    reader = service.image_reader
    if reader is None:
        return ChatImages(check_messages(call.messages, left_out), left_out=list(left_out or ()))
    roles = media_roles(service.chat_template, reader.placeholders, has_tools=has_tools)
    marked, taken = take_images(call.messages, roles, left_out, call.image_result_name)
    messages = check_messages(marked, left_out, takes_images=True)
    if not taken:
        return ChatImages(messages, left_out=list(left_out or ()))
    given = [GivenImage(*each) for each in taken]
    reader.check_count(given, "messages")
    # Then read all of them. A failure cancels images that wait for a thread. Settings of the call
    # are read in a thread, too, since they replace some of the model's files.
    images = await asyncio.to_thread(reader.open_call, service.engine.limits, call.picture_settings)
    futures = [asyncio.wrap_future(images.submit(each)) for each in given]
    try:
        found = await asyncio.gather(*futures)
    finally:
        for future in futures:
            future.cancel()
    return ChatImages(messages, found, images, list(left_out or ()))
