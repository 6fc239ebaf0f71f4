"""The protocol of KV memory that a sleeping engine gives back; see `sleep`."""

from typing import Protocol


class KVMemory(Protocol):
    """Memory of the KV cache that can be released: `runtime.model_runner` has it in one process."""

    def release_memory(self) -> None:
        """Give the memory back; its contents are lost."""
        ...

    def restore_memory(self) -> None:
        """Allocate the memory again. Raises InsufficientMemoryError."""
        ...
