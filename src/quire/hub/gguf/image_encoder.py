"""Finds the GGUF file that holds a GGUF model's encoder of images.

    qwen3-vl-2b-Q4_K_M.gguf      the language model
    mmproj-F16.gguf              its encoder, beside it, in the folder above, or named by mmproj

Called by the API server and the offline API, which read the settings of the image processor, and by
the engine, which loads the encoder. Imports no torch.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from quire.errors import CheckpointError, UnsupportedModelError, shown
from quire.hub.gguf.header import GGUFFile, read_gguf
from quire.hub.gguf.naming import encoder_folders, find_gguf, is_encoder_name
from quire.hub.gguf.projectors import PROJECTORS, EncoderFields, EncoderSettings
from quire.hub.model_files import shown_name
from quire.observability.log import get_logger

TYPE = "mmproj"
"""The value of general.type in an encoder's file."""
_PROJECTOR_FIELDS = ("clip.projector_type", "clip.vision.projector_type")
logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ImageEncoder:
    """An encoder's file that fits the model, and its settings."""

    path: Path
    settings: EncoderSettings


def find_image_encoder(model: Path, named: str | None = None) -> ImageEncoder | None:
    """The encoder of the GGUF model at the path `model`; None if it has none.

    `named` is the path that the option mmproj gives. If it is None, an encoder's file beside the
    model is used, or left out with a warning if it does not fit the model. Raises CheckpointError
    and UnsupportedModelError for a named file that does not fit, and for a file whose metadata are
    wrong.
    """
    first = model if model.is_file() else find_gguf(model)
    if first is None:
        if named is not None:
            raise CheckpointError(
                f"{model} is no model in GGUF format, so it has no use for mmproj={shown(named)}"
            )
        return None
    path = _beside(first) if named is None else Path(named).expanduser()
    if path is None:
        return None
    found = read_encoder(path, read_gguf(first).metadata)
    if isinstance(found, ImageEncoder):
        return found
    if named is not None:
        raise UnsupportedModelError(f"mmproj is {shown(named)}, but {found}")
    _warn_once(f"{path.name} beside {first.name} is left out, and no images are taken: {found}")
    return None


def read_encoder(path: Path, text: Mapping[str, Any]) -> ImageEncoder | str:
    """The encoder in a file, for the model with the metadata `text`; or a clause that says why the
    model can't have it.

    Raises CheckpointError and UnsupportedModelError for a file whose metadata are wrong.
    """
    file = read_gguf(path)
    return _why_unfit(file, text) or ImageEncoder(path, _settings(file, text))


def projector_of(metadata: Mapping[str, Any]) -> str:
    """The kind of projector in an encoder's metadata; "" if they name none."""
    found = next((metadata[name] for name in _PROJECTOR_FIELDS if name in metadata), "")
    return found if isinstance(found, str) else ""


def _beside(model: Path) -> Path | None:
    """The only encoder in the nearest folder that has any; None if there are none or several."""
    found: list[Path] = []
    for folder in encoder_folders(model.absolute()):
        if not found and os.access(folder, os.R_OK):  # the folder above may be another user's
            found = sorted(each for each in folder.iterdir() if is_encoder_name(each.name))
    if len(found) > 1:
        names = ", ".join(shown_name(each.name) for each in found)
        _warn_once(
            f"no images are taken: {found[0].parent} has several encoders of images ({names}); name"
            " one by --mmproj (mmproj= in Python)"
        )
    return found[0] if len(found) == 1 else None


def _why_unfit(file: GGUFFile, text: Mapping[str, Any]) -> str | None:
    """Why a model can't have the encoder in this file; None if it can."""
    if file.metadata.get("general.type", TYPE) != TYPE or not projector_of(file.metadata):
        return f"{file.path} holds no encoder of images"
    kind, architecture = projector_of(file.metadata), text.get("general.architecture")
    if kind not in PROJECTORS:
        return (
            f"its projector_type is {shown_name(kind)}, and quire reads only"
            f" {', '.join(sorted(PROJECTORS))}"
        )
    has_sound = file.metadata.get("clip.has_audio_encoder", False) is not False
    if has_sound and not PROJECTORS[kind].may_have_sound:
        return "it holds an encoder of sound, too"
    if architecture not in PROJECTORS[kind].text_architectures:
        return f"its projector {kind} belongs to no model of the architecture {architecture!r:.80}"
    size, expected = (
        file.metadata.get("clip.vision.projection_dim"),
        text.get(f"{architecture}.embedding_length"),
    )
    if size != expected:
        return f"its embeddings have {size!r:.80} elements, but the model's have {expected!r:.80}"
    return None


def _settings(file: GGUFFile, text: Mapping[str, Any]) -> EncoderSettings:
    fields = EncoderFields(file, text)
    settings = PROJECTORS[projector_of(file.metadata)].settings(fields)
    fields.finish()
    return settings


@cache
def _warn_once(message: str) -> None:
    """Log a warning once per process, although the encoder is looked up several times."""
    logger.warning("%s", message)
