"""The registry of model architectures, without torch.

A model's name is the one in the field `architectures` of its config.json. `models.registry` adds
quire's model families; it is imported when the registry is first read.
"""

from typing import TYPE_CHECKING

from quire.registry import Registry, imported

if TYPE_CHECKING:  # it imports torch
    from quire.models.model_entry import ModelEntry

MODELS: "Registry[ModelEntry]" = Registry(
    "architecture", lambda: imported("quire.models.registry:OWN_MODELS")
)
