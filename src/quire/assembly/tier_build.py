"""Builds the tiers behind the pool: opens the cache folder, binds it to a rank's memory.

The folder is opened before the weights are read, so that one which is in use, or can't be had, is
refused at once. Its secret names contents in place of one of this process alone: else nothing would
be found again. Called by `build`.
"""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.assembly.rank_build import RankBuild
from quire.core.kv_groups import KVGroup, KVKind
from quire.errors import ConfigurationError
from quire.observability.log import get_logger
from quire.options.engine_options import EngineOptions
from quire.tiers.disk.disk_tier import DiskBudget, DiskTier
from quire.tiers.disk.folder import SECRET_BYTES, CacheFolder
from quire.tiers.fingerprint import Fingerprint, keep_description, nearest_description

TAKE_OVER_S = 10.0
"""An engine that has just died, or is about to end, may hold the folder for so long."""

MOST_DIFFERENCES = 3
"""That a line of the log names."""

logger = get_logger(__name__)


@contextmanager
def cache_folder(options: EngineOptions) -> Iterator[CacheFolder | None]:
    """The folder that the options name, while an engine is built; it is closed if that fails, and
    else the tier's. None: there is none. Raises ConfigurationError where it can't be had."""
    if options.cache_folder is None:
        yield None
        return
    folder = CacheFolder.open(options.cache_folder, wait_s=TAKE_OVER_S)
    try:
        yield folder
    except BaseException:
        folder.close()
        raise


def secret_of(folder: CacheFolder | None) -> bytes:
    """With which contents are named: the folder's, or one of this process."""
    return secrets.token_bytes(SECRET_BYTES) if folder is None else folder.secret


def build_disk_tier(
    folder: CacheFolder, options: EngineOptions, rank: RankBuild, wake_up: Callable[[], None]
) -> DiskTier:
    """Over the pages of a rank that is built. From now on the folder is the tier's to close.
    wake_up: as `DiskTier` says.

    Raises ConfigurationError where the folder would be too small for this model or can't be read,
    or the rank's memory is not the host's.
    """
    assert rank.fingerprint is not None, "with a folder, `build_rank` makes one"
    if rank.device.type != "cpu":
        raise ConfigurationError(
            f"cache_dir is {options.cache_dir!r}, but the KV cache lies on {rank.device}; the cache"
            " on disk is served on the CPU only in this version; leave it out"
        )
    try:
        tier = DiskTier(
            folder,
            rank.fingerprint.digest,
            DiskBudget(options.cache_bytes, options.cache_bytes_per_day),
            rank.runner.kv_storage.numpy(),
            [_used_bytes(group) for group in rank.layout.groups],
            wake_up,
        )
    except OSError as error:
        raise ConfigurationError(
            f"cache_dir {options.cache_dir!r} can't be read: {error.strerror or error}"
        ) from error
    keep_description(folder, rank.fingerprint)
    if len(tier.store.index) == 0:
        _explain_cold(folder, rank.fingerprint)
    return tier


def _explain_cold(folder: CacheFolder, fingerprint: Fingerprint) -> None:
    """Log why nothing is found, where something is kept: an upgrade, or another option."""
    try:
        nearest = nearest_description(folder.path, fingerprint)
    except OSError as error:
        logger.warning("%s: what is kept there can't be listed: %s", folder.path, error)
        return
    if nearest is None:
        return
    differences = fingerprint.differences(nearest)
    more = len(differences) - MOST_DIFFERENCES
    logger.info(
        "%s: what is kept there was computed otherwise (%s), so the cache begins empty: %s%s",
        *(folder.path, nearest.label, "; ".join(differences[:MOST_DIFFERENCES])),
        f"; and {more} differences more" if more > 0 else "",
    )


def _used_bytes(group: KVGroup) -> int:
    """Of a page, from its beginning. What is unused of a state is in the last of its pages, so all
    of them count as full."""
    if group.kind is KVKind.STATE:
        return group.bytes_per_block
    return group.bytes_per_block - group.unused_bytes
