"""Options about images in prompts. Their names are vLLM's."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ConfigurationError
from quire.option_fields import Flag, JsonObject, Options, Text, Texts, option

MAX_IMAGES, MAX_VIDEOS = 16, 4
"""Images and videos of one prompt, unless limit_mm_per_prompt sets other numbers."""

_DESCRIPTION = {"count", "width", "height", "num_frames"}
"""The keys of vLLM's descriptions of images and videos in limit_mm_per_prompt."""


@dataclass(frozen=True)
class ImageOptions(Options):
    """The encoder of images, the sources of images, and their number in a prompt."""

    limit_mm_per_prompt: Mapping[str, Any] | None = option(
        None,
        JsonObject(),
        group="images",
        help='images and videos of one prompt, as {"image": 4, "video": 1}; 0: none are taken',
        doc='the most images and videos of one prompt, as {"image": 4, "video": 1}; without an'
        f' entry: {MAX_IMAGES} and {MAX_VIDEOS}. Sound is never taken, so "audio" may only be 0.'
        ' An entry may also be {"count": 4, "width": 512, "height": 512}; the sizes are ignored.',
        flag=Flag(shown=f"{MAX_IMAGES} images, {MAX_VIDEOS} videos"),
    )
    mm_processor_kwargs: Mapping[str, Any] | None = option(
        None,
        JsonObject(),
        group="images",
        help='settings of the image processor that replace the model\'s, as {"max_pixels": 500000}',
        doc="settings of the image and video processors, which replace those of the model's files,"
        ' as {"max_pixels": 500000}. A setting that the processor does not read is refused.',
        flag=Flag(shown="the model's"),
    )
    allowed_media_domains: tuple[str, ...] = option(
        (),
        Texts("a host", reads_json=True),
        group="images",
        help="host from which https: images may be fetched; may be repeated",
        doc="hosts from which https: images may be fetched, each only while all its addresses are"
        " public. Without any, no image is fetched.",
        flag=Flag(metavar="HOST", shown="none: only data: URLs"),
    )
    allowed_local_media_path: str | None = option(
        None,
        Text(is_path=True),
        group="images",
        help="folder below which file: images may be read",
        doc="folder below which file: images may be read; links out of it are not followed. None:"
        " no file is read.",
        flag=Flag(metavar="DIR", shown="none"),
    )

    mmproj: str | None = option(
        None,
        Text("a GGUF file", is_path=True),
        group="model",
        help="GGUF file with the encoder of images of a model in GGUF format",
        doc="GGUF file with the encoder of images of a model in GGUF format, as llama.cpp's"
        " converter writes it (mmproj-*.gguf). None: the only such file beside the model, or"
        " else in the folder above, if it fits.",
        flag=Flag(metavar="FILE", shown="mmproj-*.gguf beside the model"),
    )

    @property
    def max_images(self) -> int:
        """The most images of one prompt."""
        return self._most("image", MAX_IMAGES)

    @property
    def max_videos(self) -> int:
        """The most videos of one prompt."""
        return self._most("video", MAX_VIDEOS)

    def _most(self, name: str, default: int) -> int:
        given = (self.limit_mm_per_prompt or {}).get(name, default)
        number: int = given.get("count", default) if isinstance(given, Mapping) else given
        return number

    def _check_together(self) -> None:
        super()._check_together()
        for name, number in (self.limit_mm_per_prompt or {}).items():
            if name not in ("image", "video", "audio"):
                raise ConfigurationError(
                    f"limit_mm_per_prompt has {name!r:.80}, but its names are image, video and"
                    " audio"
                )
            # vLLM measures memory by pictures of the sizes beside the count.
            is_described = isinstance(number, Mapping) and set(number) <= _DESCRIPTION
            numbers = [*number.values()] if is_described else [number]
            is_bound = all(type(each) is int and each >= 0 for each in numbers)
            if not is_bound or (name == "audio" and (is_described or number)):
                bound = "0: no audio is taken" if name == "audio" else "a whole number from 0"
                raise ConfigurationError(
                    f"limit_mm_per_prompt has {number!r:.80} for {name}, but must have {bound}"
                )
        folder = self.allowed_local_media_path
        if folder and not Path(folder).is_dir():
            raise ConfigurationError(
                f"allowed_local_media_path is {folder!r:.200}, but must be an existing folder"
            )
