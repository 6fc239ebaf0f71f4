"""Engine options of the KV cache; `options.engine_options` joins them with the other options."""

from dataclasses import dataclass
from typing import Any, ClassVar

from quire.core.memory.eviction import DEFAULT_ORDER, EVICTION_ORDERS
from quire.errors import ConfigurationError
from quire.option_fields import Flag, Kind, OneOf, Options, PowerOfTwo, Switch, option

AUTO = "auto"
AUTO_BLOCK_SIZE = 0
"""Placeholder for "auto" until the model is known and the block size is chosen."""
LEAST_BLOCK_SIZE, MOST_BLOCK_SIZE = 8, 2048


@dataclass(frozen=True, slots=True)
class BlockSize(Kind):
    """A power of two, or "auto", which becomes AUTO_BLOCK_SIZE."""

    metavar: ClassVar[str | None] = "N"

    def validate(self, name: str, value: Any, *, is_optional: bool) -> int:
        if value == AUTO or (value == AUTO_BLOCK_SIZE and not isinstance(value, bool)):
            return AUTO_BLOCK_SIZE
        kind = PowerOfTwo(LEAST_BLOCK_SIZE, MOST_BLOCK_SIZE)
        return kind.validate(name, value, is_optional=is_optional)


@dataclass(frozen=True)
class CacheOptions(Options):
    """How the KV cache is divided, shared and evicted."""

    block_size: int = option(
        16,
        BlockSize(),
        group="memory",
        help="tokens per KV block, or auto",
        doc='tokens per KV block, a power of two from 8 to 2048; "auto": chosen for the model, see'
        " docs/planning.md.",
    )
    enable_prefix_caching: bool | None = option(
        None,
        Switch(),
        group="memory",
        help="share the KV blocks of equal prefixes",
        doc="share the KV blocks of equal prefixes; None: yes.",
        flag=Flag(shown="yes"),
    )
    eviction: str = option(
        DEFAULT_ORDER,
        OneOf(EVICTION_ORDERS, listed=", ".join),
        group="memory",
        help="eviction order: {names}",
        doc='order in which cached prefixes are evicted: "hit_density", by frequency and recency,'
        ' or "lru", by recency alone.',
    )

    def _check_together(self) -> None:
        super()._check_together()
        if self.enable_prefix_caching is None:
            object.__setattr__(self, "enable_prefix_caching", True)  # frozen
        if self.eviction != DEFAULT_ORDER and not self.enable_prefix_caching:
            raise ConfigurationError(
                f"eviction is {self.eviction!r}, but enable_prefix_caching is False, so nothing is"
                " evicted; leave eviction out"
            )
