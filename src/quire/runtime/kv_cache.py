"""The tensors that store KV blocks: storage, each layer's view into it, copies.

    storage   [num_blocks, bytes_per_block] uint8, one contiguous page per block:

        block i | layer 0 of its group | layer 1 | ... | unused |

    host      a second storage of this form, for layers that the CPU computes beside a device

A page belongs to the KV group that currently holds its block id. All groups share the storage, and
each divides a page among its own layers (`page_layout.py`). The attention backend defines the
layout within the bytes of a layer.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from quire.attention.interface import LayerKV
from quire.core.step import BlockCopy
from quire.errors import InsufficientMemoryError
from quire.kernels.cpu.memory import FirstTouch, allocate, release_pages
from quire.kernels.transfers import DeviceLink
from quire.recurrence.state_backend import LayerStates
from quire.runtime.page_layout import KVCacheLayout


class KVCache:
    """The storage of one device, and of its layers on the host, and the copies within them."""

    def __init__(self, layout: KVCacheLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._first_touch: FirstTouch | None = None
        shape = (num_blocks, layout.bytes_per_block)
        try:
            # On the CPU the system commits a page of memory when it is first written.
            if device.type == "cpu":
                self.storage = allocate(num_blocks * layout.bytes_per_block).view(shape)
            else:
                self.storage = torch.empty(shape, dtype=torch.uint8, device=device)
            self._host = self.storage[:, :0]
            if layout.num_host_layers:
                host_shape = (num_blocks, layout.host_bytes_per_block)
                self._host = allocate(num_blocks * layout.host_bytes_per_block).view(host_shape)
        except (RuntimeError, OSError) as error:
            raise InsufficientMemoryError(
                f"{num_blocks} KV blocks of {layout.bytes_per_block} bytes"
                f" ({num_blocks * layout.bytes_per_block / 2**30:.1f} GiB) can't be allocated;"
                " lower kv_cache_memory or num_blocks"
            ) from error

    def touch(self, num_bytes: int, may_go_on: Callable[[], bool]) -> None:
        """On the CPU, have the system commit the memory of the first blocks in the background.

        See `FirstTouch`. Called once.
        """
        if self.storage.device.type == "cpu":
            self._first_touch = FirstTouch(self.storage, num_bytes, may_go_on)

    def release(self) -> None:
        """Return the memory to the system. The blocks lose their content; views stay valid."""
        if self._first_touch is not None:
            self._first_touch.stop()
        if self.layout.num_host_layers:
            release_pages(self._host)
        if self.storage.device.type == "cpu":
            release_pages(self.storage)
        else:
            self.storage.untyped_storage().resize_(0)
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Allocate the memory again that `release` returned. On a device, its address may change.

        On the CPU, the system commits the memory when it is written. Raises
        InsufficientMemoryError.
        """
        if self.storage.device.type == "cpu":
            return
        num_bytes = self.num_blocks * self.layout.bytes_per_block
        try:
            self.storage.untyped_storage().resize_(num_bytes)
        except RuntimeError as error:
            raise InsufficientMemoryError(
                f"the KV cache's {num_bytes / 2**30:.1f} GiB can't be allocated again; free memory"
                " of the device and call wake_up once more"
            ) from error

    def layers(self) -> tuple[LayerKV, ...]:
        """Each layer's view into the storage of its device or host, for `AttentionBackend.bind`."""
        layout = self.layout
        num_own = len(layout.formats) - layout.num_host_layers
        return tuple(
            LayerKV(storage[:, first : first + form.bytes_per_layer], group, form)
            for layer, ((group, first), form) in enumerate(
                zip(layout.layer_places, layout.formats, strict=True)
            )
            for storage in [self.storage if layer < num_own else self._host]
        )

    def states(self) -> tuple[LayerStates, ...]:
        """Each recurrent layer's view of its states in the storage, for `StateBackend.bind`."""
        num_token_groups = len(self.layout.groups) - len(self.layout.state_sizes)
        return tuple(
            LayerStates(
                self.storage, place.group - num_token_groups, place.first_unit, place.units_per_page
            )
            for place in self.layout.state_places
        )

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Carry out a plan's copies. No block may be a target twice, or both source and target."""
        if copies:
            copy = copy_at_once if self.storage.device.type == "cuda" else copy_in_turn
            copy(self.storage, copies)
            if self.layout.num_host_layers:
                copy_in_turn(self._host, copies)


def copy_in_turn(storage: torch.Tensor, copies: Sequence[BlockCopy]) -> None:
    """Copy blocks within storage [N, bytes] one by one, on any device.

    One indexing operation for all copies takes more than 10 times as long, because it gathers into
    a new temporary. On one thread of an AMD EPYC, 64 blocks of 64 KiB took 7.4 ms instead of 0.3
    ms, and blocks of 1.75 MiB 207 ms instead of 17 ms.
    """
    for copy in copies:
        storage[copy.target].copy_(storage[copy.source])


def copy_at_once(storage: torch.Tensor, copies: Sequence[BlockCopy]) -> None:
    """Copy blocks within storage [N, bytes] on a GPU by one launch. Does not wait for it."""
    # Triton may be missing where there is no GPU.
    from quire.kernels.triton.attention.copy_blocks import copy_blocks

    pairs = DeviceLink(storage.device).upload(np.array(copies, np.int64))
    copy_blocks(storage, storage, pairs)
