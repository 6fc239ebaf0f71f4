"""Finds the image processor of a model by the files in its folder."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from quire.errors import CheckpointError
from quire.hub.model_files import read_json_object
from quire.images.processors.gemma3 import Gemma3Processor
from quire.images.processors.gemma4 import Gemma4Processor
from quire.images.processors.idefics3 import Idefics3Processor
from quire.images.processors.internvl import InternVLProcessor
from quire.images.processors.lfm2_vl import Lfm2VlProcessor
from quire.images.processors.pixtral import PixtralProcessor
from quire.images.processors.processor import ImageProcessor
from quire.images.processors.qwen_vl import QwenProcessor

_Fields = Mapping[str, Any]

_PROCESSORS: Mapping[str, Callable[[_Fields, _Fields, _Fields], ImageProcessor]] = {
    "idefics3": Idefics3Processor,
    "smolvlm": Idefics3Processor,
    "internvl": InternVLProcessor,
    "lfm2_vl": Lfm2VlProcessor,
    "mistral3": PixtralProcessor,
    "qwen3_vl": QwenProcessor,
    "qwen3_vl_moe": QwenProcessor,
    "qwen3_5": QwenProcessor,
    "qwen3_5_moe": QwenProcessor,
    "gemma3": Gemma3Processor,
    "gemma4": Gemma4Processor,
}
"""Processors by the model_type of config.json."""


def find_processor(
    folder: Path, mmproj: str | None = None, changes: Mapping[str, Any] | None = None
) -> ImageProcessor | None:
    """The image processor of the model in a folder or GGUF file; None for models that take text
    only, which includes families without a processor here, and folders without an image processor's
    settings.

    `mmproj` is that of `find_image_encoder`. `changes` are settings that replace those of the
    files. Raises CheckpointError for unsupported settings, or a file that can't be read, and
    UnsupportedModelError for other encoders.
    """
    changes = changes or {}
    if folder.is_file() or mmproj is not None:
        # Imported here because it imports numpy, which a server for text never loads.
        from quire.hub.gguf.image_encoder import find_image_encoder

        encoder = find_image_encoder(folder, mmproj)
        if encoder is None:
            return None
        found = encoder.settings
        return _make(found.config, found.image_fields, found.processor_fields, changes)
    path = folder / "config.json"
    if not path.is_file():
        return None
    config = read_json_object(path)
    kind = _kind(config)
    if kind not in _PROCESSORS or config.get("vision_config") is None:
        return None
    around = _read(folder / "processor_config.json")
    image_fields = _read(folder / "preprocessor_config.json")
    if not image_fields:
        # transformers 5 writes the settings of all parts into one file.
        nested = around.get("image_processor")
        image_fields = nested if isinstance(nested, dict) else {}
    video_fields = _read(folder / "video_preprocessor_config.json")
    if video_fields:
        around["video_processor"] = video_fields
    return _make(config, image_fields, around, changes) if image_fields else None


class _NotedFields(Mapping[str, Any]):
    """Fields, and the names that were looked up in them."""

    def __init__(self, fields: _Fields) -> None:
        self.read: set[str] = set()
        self._fields = fields

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


def _make(
    config: _Fields, image_fields: _Fields, fields: _Fields, changes: _Fields
) -> ImageProcessor:
    """The processor with these settings. `changes` replace settings of images and of videos.

    Raises CheckpointError, also for a change that the processor doesn't read.
    """
    images = _NotedFields({**image_fields, **changes})
    videos = _NotedFields({**(fields.get("video_processor") or {}), **changes})
    if fields.get("video_processor"):
        fields = {**fields, "video_processor": videos}
    processor = _PROCESSORS[_kind(config)](config, images, fields)
    if unread := sorted(changes.keys() - images.read - videos.read):
        raise CheckpointError(
            f"{unread[0]} is no setting of the model's image processor, {type(processor).__name__}"
        )
    return processor


def _kind(config: Mapping[str, Any]) -> str:
    """The key of the model's processor."""
    kind, vision = str(config.get("model_type")), config.get("vision_config")
    if kind == "llava" and isinstance(vision, dict) and vision.get("model_type") == "pixtral":
        return "mistral3"
    return kind


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}
