"""Plans which layers share a KV page, the page size, and each layer's offset in pages.

All groups of a model take pages of equal size from one pool, though their layers need different
numbers of bytes. So part of a page may be unused. The page size is chosen so that few bytes are
unused and there are few groups. A unit is a part of a recurrent state that is never split between
pages. Called by `assembly.rank_build`.

    token group    block of B tokens:  | K and V of layer a | of layer b | ... | unused |
    state group    a part of a state:  | unit | unit | ... | unused |
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from quire.attention.interface import AttentionBackend, AttentionSpec, KVPageFormat
from quire.attention.kv_format import KVFormat
from quire.core.kv_groups import KVGroup, KVKind
from quire.recurrence.state_backend import RecurrentSpec

PAGE_ALIGNMENT_BYTES = 64

GROUP_COST = 0.0025
"""An additional group must save at least this share of the memory that sequences hold, since each
group costs a block table per sequence, and an allocation and a hash per block."""

LENGTH_PARTS = (1, 8, 64)
"""The page size is chosen for sequences of several lengths: the typical length divided by each of
these numbers."""

ORDER = (KVKind.FULL, KVKind.LATENT, KVKind.WINDOW, KVKind.STATE)
"""The order of a layout's groups."""

MAX_STATE_PAGES = 64
"""The largest number of pages into which one state is divided."""


@dataclass(frozen=True, slots=True)
class StatePlace:
    """The place of a recurrent layer's units in the pages of its group.

    Unit u of the layer is in entry (first_unit + u) // units_per_page of a row's table, at byte
    ((first_unit + u) % units_per_page) * unit_bytes of that page.
    """

    #: The group's index in `KVCacheLayout.groups`.
    group: int
    first_unit: int
    units_per_page: int


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """The place of each layer's part of a block."""

    #: Groups of tokens come first, then groups of states; see ORDER.
    groups: tuple[KVGroup, ...]
    #: The number of bytes of a page on the device, the same for all groups.
    bytes_per_block: int
    #: For each attention layer, its group and its first byte in the page.
    layer_places: tuple[tuple[int, int], ...]
    #: For each attention layer, the format in which the backend stores its part.
    formats: tuple[KVPageFormat, ...]
    #: For each recurrent layer, the place of its units.
    state_places: tuple[StatePlace, ...] = ()
    #: Number of attention layers, the last ones, whose pages are in the host's memory.
    num_host_layers: int = 0
    #: Bytes of a block in the host's memory; `bytes_per_block` are those on the device.
    host_bytes_per_block: int = 0

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """For each group of states, the number of blocks of a state."""
        return tuple(g.num_state_blocks for g in self.groups if g.kind is KVKind.STATE)

    def over_ranks(self, num_ranks: int) -> "KVCacheLayout":
        """The same layout with the bytes that the blocks take on all `num_ranks` ranks together."""
        groups = tuple(
            replace(
                group,
                bytes_per_block=group.bytes_per_block * num_ranks,
                unused_bytes=group.unused_bytes * num_ranks,
            )
            for group in self.groups
        )
        return replace(self, groups=groups, bytes_per_block=self.bytes_per_block * num_ranks)


@dataclass(frozen=True, slots=True)
class HostLayers:
    """The last attention layers of a model, whose pages are in the host's memory."""

    num_layers: int
    #: The backend that computes their attention.
    backend: type[AttentionBackend]


@dataclass(frozen=True, slots=True)
class PageNeeds:
    """The bytes that layers need, from which a layout is planned."""

    #: {(kind, window): {index of an attention layer: its bytes in a block}}.
    layers: Mapping[tuple[KVKind, int | None], Mapping[int, int]]
    #: {bytes of a unit: {index of a recurrent layer: its number of units}}.
    states: Mapping[int, Mapping[int, int]]


def plan_layout(
    specs: Sequence[AttentionSpec],
    backend: type[AttentionBackend],
    block_size: int,
    kv_format: KVFormat,
    *,
    recurrent_specs: Sequence[RecurrentSpec] = (),
    typical_tokens: int = 4096,
    host: HostLayers | None = None,
) -> KVCacheLayout:
    """Form KV groups of layers with the same growth rule, and choose the page size.

    The choice minimises unused memory for sequences of about `typical_tokens` tokens. `host` are
    the layers whose pages are in the host's memory; None if all are on the device. Raises
    ConfigurationError for layers that the backend can't serve.
    """
    # First, collect the bytes that each layer needs.
    num_own = len(specs) - (0 if host is None else host.num_layers)
    formats = tuple(
        (backend if host is None or layer < num_own else host.backend).page_format(
            spec, block_size, kv_format
        )
        for layer, spec in enumerate(specs)
    )
    layers: dict[tuple[KVKind, int | None], dict[int, int]] = {}
    for layer, spec in enumerate(specs):
        layers.setdefault(_rule(spec), {})[layer] = formats[layer].bytes_per_layer
    states: dict[int, dict[int, int]] = {}
    for layer, recurrent in enumerate(recurrent_specs):
        states.setdefault(recurrent.unit_bytes, {})[layer] = recurrent.num_units
    ordered = sorted(layers.items(), key=lambda item: ORDER.index(item[0][0]))
    needs = PageNeeds(dict(ordered), states)
    # Then form the groups and choose the page size.
    groups = plan_groups(needs, block_size, typical_tokens)
    # Last, place the layers of each group one after the other in its page, on device or host.
    own_bytes = host_bytes = 0
    layer_places: dict[int, tuple[int, int]] = {}
    state_places: dict[int, StatePlace] = {}
    for index, group in enumerate(groups):
        if group.kind is KVKind.STATE:
            state_places |= _places_of_state(index, group, needs)
            continue
        firsts = {True: 0, False: 0}
        for layer in group.layers:
            layer_places[layer] = (index, firsts[layer < num_own])
            firsts[layer < num_own] += formats[layer].bytes_per_layer
        own_bytes, host_bytes = max(own_bytes, firsts[True]), max(host_bytes, firsts[False])
    return KVCacheLayout(
        groups,
        groups[0].bytes_per_block if host is None else _aligned(own_bytes),
        tuple(layer_places[layer] for layer in range(len(specs))),
        formats,
        tuple(state_places[layer] for layer in range(len(recurrent_specs))),
        0 if host is None else host.num_layers,
        _aligned(host_bytes),
    )


def _aligned(num_bytes: int) -> int:
    return num_bytes + -num_bytes % PAGE_ALIGNMENT_BYTES


def _rule(spec: AttentionSpec) -> tuple[KVKind, int | None]:
    """The layer's kind and window, which determine how its memory grows and is freed."""
    if spec.value_dim is not None and spec.window is None:
        return KVKind.LATENT, None
    if spec.window is not None:
        return KVKind.WINDOW, spec.window
    return KVKind.FULL, None


def _places_of_state(index: int, group: KVGroup, needs: PageNeeds) -> dict[int, StatePlace]:
    layers = set(group.layers)
    unit_bytes = next(size for size, counts in needs.states.items() if counts.keys() == layers)
    places: dict[int, StatePlace] = {}
    first_unit = 0
    for layer, num_units in needs.states[unit_bytes].items():
        places[layer] = StatePlace(index, first_unit, group.bytes_per_block // unit_bytes)
        first_unit += num_units
    return places


def plan_groups(needs: PageNeeds, block_size: int, typical_tokens: int) -> tuple[KVGroup, ...]:
    """The groups with pages of the best size.

    The cost of a size is the share of a sequence's pages that is unused, averaged over several
    lengths, plus GROUP_COST for each group. If costs are equal, the larger page is chosen.
    """
    lengths = [-(-typical_tokens // part) for part in LENGTH_PARTS]

    def cost(groups: tuple[KVGroup, ...]) -> tuple[float, int]:
        unused = fmean(unused_share(groups, block_size, length) for length in lengths)
        return round(unused + GROUP_COST * len(groups), 6), -groups[0].bytes_per_block

    return min((_groups(needs, page) for page in sorted(_page_sizes(needs))), key=cost)


def blocks_held(group: KVGroup, num_tokens: int, block_size: int) -> int:
    """The number of the group's pages that a sequence of `num_tokens` computed tokens reads."""
    if group.kind is KVKind.STATE:
        return group.num_state_blocks
    num_blocks = -(-num_tokens // block_size)
    if group.window is None:
        return num_blocks
    return min(num_blocks, -(-group.window // block_size) + 1)


def unused_share(groups: Iterable[KVGroup], block_size: int, num_tokens: int) -> float:
    """The unused share of the pages that a sequence of `num_tokens` tokens holds."""
    unused = held = 0
    for group in groups:
        num_blocks = blocks_held(group, num_tokens, block_size)
        held += num_blocks * group.bytes_per_block
        is_state = group.kind is KVKind.STATE
        unused += group.unused_bytes * (1 if is_state else num_blocks)
    return unused / held


def _page_sizes(needs: PageNeeds) -> set[int]:
    """The candidates for the page size, each large enough for any one layer or unit.

    A candidate is the size of the n largest layers of a kind, for any n, or of a state divided by
    any n. Each such size is also a candidate when rounded up to whole units.
    """
    least = [size for sizes in needs.layers.values() for size in sizes.values()]
    least += needs.states
    found: set[int] = set()
    for sizes in needs.layers.values():
        ordered = sorted(sizes.values(), reverse=True)
        found.update(sum(ordered[:count]) for count in range(1, len(ordered) + 1))
    for unit_bytes, counts in needs.states.items():
        num_units = sum(counts.values())
        found.update(
            -(-num_units // parts) * unit_bytes
            for parts in range(1, min(num_units, MAX_STATE_PAGES) + 1)
        )
    for unit_bytes in needs.states:
        found |= {size + -size % unit_bytes for size in found}
    aligned = set(map(_aligned, found))
    return {size for size in aligned if size >= max(least)}


def _groups(needs: PageNeeds, page: int) -> tuple[KVGroup, ...]:
    """The groups, if pages have `page` bytes."""
    groups: list[KVGroup] = []
    for (kind, window), sizes in needs.layers.items():
        for layers in _packed(sizes, page):
            unused = page - sum(sizes[layer] for layer in layers)
            groups.append(KVGroup(layers, kind, page, window, unused_bytes=unused))
    for unit_bytes, counts in needs.states.items():
        num_units = sum(counts.values())
        num_pages = -(-num_units // (page // unit_bytes))
        unused = num_pages * page - num_units * unit_bytes
        groups.append(KVGroup(tuple(counts), KVKind.STATE, page, None, num_pages, unused))
    return tuple(groups)


def _packed(sizes: Mapping[int, int], page: int) -> list[tuple[int, ...]]:
    """The layers of each page: first-fit packing, the largest layers first."""
    bins: list[list[int]] = []
    room: list[int] = []
    for layer in sorted(sizes, key=lambda layer: (-sizes[layer], layer)):
        place = next((at for at, left in enumerate(room) if left >= sizes[layer]), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(page)
        bins[place].append(layer)
        room[place] -= sizes[layer]
    return [tuple(sorted(layers)) for layers in bins]
