"""The table of all llama.cpp architectures that quire reads.

To add an architecture, add a line to the table of the module that translates its config.
"""

from quire.errors import UnsupportedModelError
from quire.hub.model_files import shown_name
from quire.models.checkpoints.gguf.families.architecture import Architecture
from quire.models.checkpoints.gguf.families.dense import DENSE
from quire.models.checkpoints.gguf.families.encoders import ENCODERS
from quire.models.checkpoints.gguf.families.gemma import GEMMA
from quire.models.checkpoints.gguf.families.hybrids import HYBRIDS
from quire.models.checkpoints.gguf.families.latent import LATENT
from quire.models.checkpoints.gguf.families.mixtures import MIXTURES
from quire.models.checkpoints.gguf.gguf_model import GGUFModel

ARCHITECTURES: dict[str, Architecture] = DENSE | ENCODERS | GEMMA | HYBRIDS | LATENT | MIXTURES
"""Maps the metadata field general.architecture to its translation."""


def find_architecture(model: GGUFModel) -> Architecture:
    """The translation for the model. Raises UnsupportedModelError for an unknown architecture."""
    if model.architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{model.path} is of the architecture {shown_name(model.architecture)}, but quire reads"
            f" only {', '.join(sorted(ARCHITECTURES))} from GGUF files; name the original model's "
            "folder or hub id instead"
        )
    return ARCHITECTURES[model.architecture]
