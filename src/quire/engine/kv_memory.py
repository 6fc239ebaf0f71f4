"""What the engine needs of memory that can be given back. See `sleep`."""

from typing import Protocol


class KVMemory(Protocol):
    """Memory of the KV cache: `runtime.model_runner`'s, where one process computes."""

    def release_memory(self) -> None:
        """Give it back; what it held is lost."""
        ...

    def restore_memory(self) -> None:
        """Have it again. Raises InsufficientMemoryError."""
        ...
