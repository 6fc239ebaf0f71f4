"""Reads an encoder of images from a GGUF file, presented as a Hugging Face checkpoint.

`hub.gguf.image_encoder` finds the file and reads its settings. Called by `models.vision.towers`.
"""

from pathlib import Path

from quire.hub.gguf.image_encoder import TYPE, projector_of
from quire.models.checkpoints.gguf.families.image_encoders import ENCODER_RULES, joined_patches
from quire.models.checkpoints.gguf.gguf_files import GGUFFiles
from quire.models.checkpoints.gguf.gguf_model import GGUFModel
from quire.models.checkpoints.gguf.tensor_map import map_tensors


class GGUFEncoderFile(GGUFFiles):
    """The tensors of an encoder and its connector."""

    def __init__(self, path: Path) -> None:
        """`path` is a file that `find_image_encoder` has found. Raises CheckpointError."""
        self._model = GGUFModel(path, TYPE)
        rules = ENCODER_RULES[projector_of(self._model.metadata)](self._model)
        self._locations = map_tensors(self._model, rules) | joined_patches(self._model)
