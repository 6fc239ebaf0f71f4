"""The registry of model architectures, without torch.

quire's own are in `models.registry`, which is imported when the registry is first read. The names
are those in the `architectures` of a config.json.
"""

from typing import TYPE_CHECKING

from quire.registry import Registry, imported

if TYPE_CHECKING:  # it imports torch
    from quire.models.model_entry import ModelEntry

MODELS: "Registry[ModelEntry]" = Registry(
    "architecture", lambda: imported("quire.models.registry:OWN_MODELS")
)
