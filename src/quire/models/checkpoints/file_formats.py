"""The registry of checkpoint sources, without torch: safetensors, GGUF and those of plugins.

To add one, add a file with a `CheckpointSource`, and a line here.
"""

from typing import TYPE_CHECKING

from quire.registry import Registry

if TYPE_CHECKING:  # it imports torch
    from quire.models.checkpoints.source import CheckpointSource

CHECKPOINT_SOURCES: "Registry[type[CheckpointSource]]" = Registry(
    "checkpoint source",
    {
        "safetensors": "quire.models.checkpoints.safetensors_files:SafetensorsFiles",
        "gguf": "quire.models.checkpoints.gguf.gguf_files:GGUFFiles",
    },
)
"""The sources in order of priority: the first one that finds its files in a folder is used."""
