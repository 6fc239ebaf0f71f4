"""Engine options of the cache tiers: the disk folder and the page-locked host memory.

`options.engine_options` joins them with the other options. Does not import torch, so that the
command line can check options quickly.
"""

from dataclasses import dataclass
from pathlib import Path

from quire.errors import ConfigurationError
from quire.option_fields import Bytes, Flag, Options, Text, option

DEFAULT_SIZE = "20GiB"
DEFAULT_STAGING = "256MiB"
"""Default of host_cache_size on a GPU if cache_dir is set."""
LEAST_BYTES = 1 << 20
"""Lower limit of cache_size and host_cache_size for any model. The minimum for the actual model is
checked when the folder is opened."""

DAYS_REWRITES = 10
"""Default of cache_writes_per_day, as a multiple of cache_size. With 20 GiB, a drive of 1 TB rated
for 600 TB lasts eight years."""


@dataclass(frozen=True)
class TierOptions(Options):
    """Where cached prefixes are kept beyond the KV cache, and how much of them."""

    cache_dir: str | None = option(
        None,
        Text("a folder", is_path=True),
        group="memory",
        help="folder that keeps cached prefixes on disk, over restarts and crashes; one engine's at"
        " a time",
        doc="a folder that keeps cached prefixes on disk: they are found again after a restart or"
        " a crash, and loaded where that is faster than to compute them. It is made if it is not"
        " there, with mode 0700, and belongs to one engine at a time.",
        flag=Flag(metavar="FOLDER"),
    )
    cache_size: int | str | None = option(
        None,
        Bytes(LEAST_BYTES, usual_unit="GiB"),
        group="memory",
        help="bytes that cache_dir may hold, such as 100GiB",
        doc=f"bytes that cache_dir may hold, or text such as {DEFAULT_SIZE!r}; the oldest"
        f" contents are removed first. None: {DEFAULT_SIZE}.",
        flag=Flag(shown=DEFAULT_SIZE),
    )
    cache_writes_per_day: int | str | None = option(
        None,
        Bytes(0),
        group="memory",
        help="bytes a day that may be written to cache_dir, to spare the drive; 0: only read it",
        doc="bytes a day that may be written to cache_dir, to spare the drive; 0: the folder is"
        f" only read. None: {DAYS_REWRITES} times cache_size.",
        flag=Flag(shown=f"{DAYS_REWRITES} times the cache size"),
    )

    host_cache_size: int | str | None = option(
        None,
        Bytes(LEAST_BYTES, usual_unit="GiB"),
        group="memory",
        help="page-locked host memory for cached prefixes that don't fit into the KV cache on a"
        " GPU, such as 8GiB. Refused on a CPU, where the KV cache itself is host memory",
        doc="bytes of the host's memory that keep cached prefixes, and what preempted requests had"
        ' computed, when the KV cache on a GPU has no room for them, or text such as "8GiB". It is'
        " page-locked from the start, for this process alone. None: there is no such tier; with a"
        f" cache_dir on a GPU, {DEFAULT_STAGING}, since data for the disk passes through it. On a"
        " CPU it is refused: the KV cache itself is the host's memory.",
        flag=Flag(shown=f"none, or {DEFAULT_STAGING} with a cache folder"),
    )

    @property
    def given_tiers(self) -> dict[str, str]:
        """The given options that enable a tier, as name -> repr of the value; empty if there is no
        tier."""
        asking = {"cache_dir": self.cache_dir, "host_cache_size": self.host_cache_size}
        return {name: repr(value) for name, value in asking.items() if value is not None}

    @property
    def cache_folder(self) -> Path | None:
        """cache_dir as a path; None if there is no disk tier."""
        return None if self.cache_dir is None else Path(self.cache_dir).expanduser()

    @property
    def host_cache_bytes(self) -> int:
        """host_cache_size in bytes; DEFAULT_STAGING if it is None."""
        if self.host_cache_size is None:
            size = Bytes(LEAST_BYTES).validate("host_cache_size", DEFAULT_STAGING, is_optional=True)
            assert isinstance(size, int)
            return size
        assert isinstance(self.host_cache_size, int)
        return self.host_cache_size

    @property
    def cache_bytes(self) -> int:
        """cache_size in bytes; valid only if cache_dir is set."""
        assert isinstance(self.cache_size, int)
        return self.cache_size

    @property
    def cache_bytes_per_day(self) -> int:
        """cache_writes_per_day in bytes; valid only if cache_dir is set."""
        assert isinstance(self.cache_writes_per_day, int)
        return self.cache_writes_per_day

    def _check_together(self) -> None:
        super()._check_together()
        if self.cache_dir is None:
            self._check_unused()
            return
        if self.cache_size is None:  # set this way since the class is frozen
            size = Bytes(LEAST_BYTES).validate("cache_size", DEFAULT_SIZE, is_optional=True)
            object.__setattr__(self, "cache_size", size)
        if self.cache_writes_per_day is None:
            object.__setattr__(self, "cache_writes_per_day", DAYS_REWRITES * self.cache_bytes)

    def _check_unused(self) -> None:
        for name in ("cache_size", "cache_writes_per_day"):
            value = getattr(self, name)
            if value is not None:
                raise ConfigurationError(
                    f"{name} is {value}, but it has no effect without cache_dir; set cache_dir,"
                    " or leave it out"
                )
