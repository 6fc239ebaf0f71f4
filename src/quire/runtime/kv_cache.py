"""The tensors behind the KV blocks: groups of layers, storage, copies.

    storage   [num_blocks, bytes_per_block] uint8, one contiguous page per block:

        block i | layer 0 of its group | layer 1 | ... | padding to 64 bytes |

A page belongs to whichever KV group holds its id at the moment; all groups see the same storage and
give their layers the same places in a page. What lies inside a layer's part is the backend's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from quire.attention.interface import AttentionBackend, AttentionSpec, KVPageFormat, LayerKV
from quire.core.kv_groups import KVGroup, KVKind
from quire.core.step import BlockCopy
from quire.errors import InsufficientMemoryError
from quire.kernels.cpu.memory import allocate, give_back
from quire.kernels.transfers import DeviceLink

PAGE_ALIGNMENT_BYTES = 64

# One more group must save at least this share of the layers' memory.
GROUP_COST_PERCENT = 5


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """Where each layer's part of a block lies.

    bytes_per_block: of a page; equal for all groups.
    layer_places: for each layer, (group, first byte in the page).
    formats: for each layer, what the backend puts there.
    """

    groups: tuple[KVGroup, ...]
    bytes_per_block: int
    layer_places: tuple[tuple[int, int], ...]
    formats: tuple[KVPageFormat, ...]

    def over_ranks(self, num_ranks: int) -> "KVCacheLayout":
        """The same blocks, each with its pages on so many ranks: what all of them take."""
        size = self.bytes_per_block * num_ranks
        groups = tuple(replace(group, bytes_per_block=size) for group in self.groups)
        return replace(self, groups=groups, bytes_per_block=size)


def plan_layout(
    specs: Sequence[AttentionSpec],
    backend: type[AttentionBackend],
    block_size: int,
    dtype: torch.dtype,
) -> KVCacheLayout:
    """Form KV groups of layers that behave alike, all with places for the same number of layers.

    With one kind of layer that is one group. With several, each kind fills as many as it needs; the
    last of each kind may leave places of its pages unused.
    """
    formats = tuple(backend.page_format(spec, block_size, dtype) for spec in specs)
    kinds: dict[tuple[int | None, int], list[int]] = {}
    for layer, spec in enumerate(specs):
        kinds.setdefault((spec.window, formats[layer].bytes_per_layer), []).append(layer)
    width = choose_width([len(layers) for layers in kinds.values()])
    page = max(width * size for _, size in kinds)
    page += -page % PAGE_ALIGNMENT_BYTES
    groups: list[KVGroup] = []
    places: dict[int, tuple[int, int]] = {}
    for (window, size), layers in kinds.items():
        kind = KVKind.FULL if window is None else KVKind.WINDOW
        for start in range(0, len(layers), width):
            members = tuple(layers[start : start + width])
            for index, layer in enumerate(members):
                places[layer] = (len(groups), index * size)
            groups.append(KVGroup(members, kind, page, window))
    layer_places = tuple(places[layer] for layer in range(len(specs)))
    return KVCacheLayout(tuple(groups), page, layer_places, formats)


def choose_width(kind_sizes: Sequence[int]) -> int:
    """Layers per group, for so many layers of each kind.

    A wide group leaves places unused where a kind doesn't fill its last one: memory lost in every
    page. A narrow one makes many groups, and each has a block table per sequence, an allocation and
    a hash per block. So the least of padded layers / layers + 5% per group; of equals the wider.
    """
    num_layers = sum(kind_sizes)

    def cost(width: int) -> tuple[int, int]:
        num_groups = sum(-(-size // width) for size in kind_sizes)
        num_padded = num_groups * width - num_layers
        # In percent and times num_layers, so that equals are equal: whole numbers only.
        return 100 * num_padded + GROUP_COST_PERCENT * num_groups * num_layers, -width

    return min(range(1, max(kind_sizes) + 1), key=cost)


class KVCache:
    """The storage of one device, and the copies within it."""

    def __init__(self, layout: KVCacheLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        shape = (num_blocks, layout.bytes_per_block)
        try:
            # Either way the operating system commits a page of memory when it is first written.
            if device.type == "cpu":
                self.storage = allocate(num_blocks * layout.bytes_per_block).view(shape)
            else:
                self.storage = torch.empty(shape, dtype=torch.uint8, device=device)
        except (RuntimeError, OSError) as error:
            raise InsufficientMemoryError(
                f"{num_blocks} KV blocks of {layout.bytes_per_block} bytes"
                f" ({num_blocks * layout.bytes_per_block / 2**30:.1f} GiB) can't be allocated;"
                " lower kv_cache_memory or num_blocks"
            ) from error

    def release(self) -> None:
        """Give the memory back to the system; what was in the blocks is lost. Views stay valid."""
        if self.storage.device.type == "cpu":
            give_back(self.storage)
        else:
            self.storage.untyped_storage().resize_(0)
            torch.cuda.empty_cache()

    def restore(self) -> bool:
        """Have the memory again that `release` gave back; whether it lies elsewhere than before.

        On the CPU the system brings it as it is written. Raises InsufficientMemoryError.
        """
        if self.storage.device.type == "cpu":
            return False
        num_bytes = self.num_blocks * self.layout.bytes_per_block
        try:
            self.storage.untyped_storage().resize_(num_bytes)
        except RuntimeError as error:
            raise InsufficientMemoryError(
                f"the KV cache's {num_bytes / 2**30:.1f} GiB can't be had again; free memory of the"
                " device and call wake_up once more"
            ) from error
        return True

    def layers(self) -> tuple[LayerKV, ...]:
        """Each layer's view into the storage, for `AttentionBackend.bind`."""
        return tuple(
            LayerKV(self.storage[:, first : first + form.bytes_per_layer], group, form)
            for (group, first), form in zip(
                self.layout.layer_places, self.layout.formats, strict=True
            )
        )

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Carry out a plan's copies; no block is a target twice or both source and target."""
        if copies:
            copy = copy_at_once if self.storage.device.type == "cuda" else copy_in_turn
            copy(self.storage, copies)


def copy_in_turn(storage: torch.Tensor, copies: Sequence[BlockCopy]) -> None:
    """Of storage [N, bytes], on any device.

    Indexing with all of them at once gathers into a fresh temporary, and takes more than 10 times
    as long (64 blocks of 64 KiB: 7.4 ms against 0.3 ms, of 1.75 MiB: 207 ms against 17 ms; AMD
    EPYC, one thread).
    """
    for copy in copies:
        storage[copy.target].copy_(storage[copy.source])


def copy_at_once(storage: torch.Tensor, copies: Sequence[BlockCopy]) -> None:
    """The same in one launch, on a GPU. Does not wait for it."""
    # Triton may be missing where there is no GPU.
    from quire.kernels.triton.attention.copy_blocks import copy_blocks

    pairs = DeviceLink(storage.device).upload(np.array(copies, np.int64))
    copy_blocks(storage, storage, pairs)
