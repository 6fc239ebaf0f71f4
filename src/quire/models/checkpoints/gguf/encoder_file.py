"""Reads an encoder of images from a GGUF file, presented as a Hugging Face checkpoint.

`hub.gguf.image_encoder` finds the file and reads its settings. Called by `models.vision.towers`.
"""

from pathlib import Path

from quire.errors import CheckpointError
from quire.hub.gguf.image_encoder import TYPE, projector_of
from quire.models.checkpoints.gguf.families.image_encoders import ENCODER_RULES, joined_patches
from quire.models.checkpoints.gguf.gguf_files import GGUFFiles
from quire.models.checkpoints.gguf.gguf_model import GGUFModel
from quire.models.checkpoints.gguf.tensor_map import map_tensors
from quire.models.checkpoints.loader import listed

_SOUND = ("a.", "mm.a.")
"""Prefixes of the names of an encoder of sound."""


class GGUFEncoderFile(GGUFFiles):
    """The tensors of an encoder and its connector."""

    def __init__(self, path: Path) -> None:
        """`path` is a file that `find_image_encoder` has found. Raises CheckpointError."""
        self._model = GGUFModel(path, TYPE)
        rules = ENCODER_RULES[projector_of(self._model.metadata)](self._model)
        self._locations = map_tensors(self._model, rules) | joined_patches(self._model)
        # Tensors without a rule keep their names.
        unknown = [
            name
            for name in self._locations.keys() & self._model.tensors.keys()
            if not name.startswith(_SOUND)
        ]
        if unknown:
            raise CheckpointError(
                f"{path}: quire does not know the tensors {listed(unknown)} of the encoder of"
                " images, which may change its results; set language_model_only to serve the model"
                " for text"
            )
