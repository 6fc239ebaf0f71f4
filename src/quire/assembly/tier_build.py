"""Builds the cache tiers below the KV pool, in the host's memory and on disk.

    on the CPU    pool <-> disk            the pool is in the host's memory
    on a GPU      pool <-> host <-> disk   or host alone; a disk alone gets a small host tier

The folder is opened before the weights are read, so that a folder which is in use or not accessible
is refused at once. Block hashes are made with the folder's secret instead of a new one, so that
later processes find the blocks. With several ranks, each opens its part of the tier in its own
process. Called by `build` and `engine_process.worker_main`.
"""

import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from quire.assembly.device_setup import TRITON, choose_device
from quire.assembly.rank_build import RankBuild
from quire.core.memory.tiers.contract import Tiers
from quire.errors import ConfigurationError, InsufficientMemoryError
from quire.kernels.cpu.library import NativeUnavailableError, load_library
from quire.observability.log import get_logger
from quire.observability.machine_memory import available_memory_bytes
from quire.options.engine_options import EngineOptions
from quire.tiers.disk.disk_tier import DiskBudget, DiskTier
from quire.tiers.disk.files import Files
from quire.tiers.disk.folder import SECRET_BYTES, CacheFolder, RankPart
from quire.tiers.disk.native_files import NativeFiles
from quire.tiers.fingerprint import Fingerprint, joined, nearest_description, write_description
from quire.tiers.host.cuda_lanes import CudaLane, page_locked
from quire.tiers.host.host_tier import HostTier
from quire.tiers.host.plain_lane import PlainLane
from quire.tiers.host.staged_copies import StagedCopies, copy_pairs_in_turn
from quire.tiers.rank_service import RankService
from quire.tiers.ranks import RankedTiers, RankLink
from quire.tiers.stack import TierStack

TAKE_OVER_S = 10.0
"""Seconds to wait until an engine that has just died, or is about to end, releases the folder."""

LEAST_SLOTS = 16
"""The fewest slots of a host tier, so that loads and writes to the disk don't wait for each
other."""

MOST_DIFFERENCES = 3
"""Maximum number of differences that a log line names."""

logger = get_logger(__name__)


@contextmanager
def cache_folder(options: EngineOptions) -> Iterator[CacheFolder | None]:
    """Open the cache folder that the options name, if any, while an engine is built.

    If the build fails, the folder is closed; otherwise the tier owns it. Raises ConfigurationError
    if it can't be opened.
    """
    if options.cache_folder is None:
        yield None
        return
    folder = CacheFolder.open(options.cache_folder, _files(), wait_s=TAKE_OVER_S)
    try:
        yield folder
    except BaseException:
        with suppress(OSError):  # the system closes the descriptor even if it reports an error
            folder.close()
        raise


def _files() -> Files:
    """Access to files by the native library, or by Python if there is none."""
    try:
        return NativeFiles(load_library())
    except NativeUnavailableError:
        return Files()


def secret_of(folder: CacheFolder | None) -> bytes:
    """The secret for block hashes: the folder's, or else a new secret for this process."""
    return secrets.token_bytes(SECRET_BYTES) if folder is None else folder.secret


def check_host_tier(options: EngineOptions) -> None:
    """Raises ConfigurationError if a host tier is wanted but the KV cache is in the host's
    memory."""
    if options.host_cache_size is None or options.kernels == TRITON:
        return  # in tests, Triton's interpreter stands for a GPU
    if choose_device(options.device).type == "cpu":
        raise ConfigurationError(
            f"host_cache_size is {options.host_cache_size}, but on a CPU the KV cache is the host's"
            " memory itself; leave it out, and give kv_cache_memory more"
        )


def build_tiers(
    folder: CacheFolder | None,
    options: EngineOptions,
    rank: RankBuild,
    wake_up: Callable[[], None],
) -> Tiers | None:
    """The tiers below the pool of a rank that is built; None if the options ask for none.

    From now on the tiers own the folder. For `wake_up` see `DiskTier`. Raises ConfigurationError
    if a tier would be too small for this model, and InsufficientMemoryError if the host has too
    little memory.
    """
    storage = rank.runner.kv_storage
    if options.host_cache_size is None and (folder is None or rank.device.type == "cpu"):
        return None if folder is None else build_disk_tier(folder, options, rank, wake_up)
    host = HostTier(new_copies(storage, _num_slots(options, storage.shape[1])))
    if folder is None:
        return host
    try:
        disk = build_disk_tier(folder, options, rank, wake_up, host.copies.slots)
    except BaseException:
        host.close()
        raise
    return TierStack(host, disk)


def _num_slots(options: EngineOptions, page_bytes: int) -> int:
    """The number of slots that fit into host_cache_size."""
    wanted = options.host_cache_bytes
    num_slots = wanted // page_bytes
    if num_slots < LEAST_SLOTS and options.host_cache_size is None:
        num_slots = LEAST_SLOTS
    elif num_slots < LEAST_SLOTS:
        raise ConfigurationError(
            f"host_cache_size is {wanted} bytes, but with blocks of {page_bytes} bytes at least"
            f" {LEAST_SLOTS * page_bytes} are needed; give a larger host_cache_size"
        )
    num_bytes = num_slots * page_bytes
    if num_bytes > (available := available_memory_bytes()):
        raise InsufficientMemoryError(
            f"host_cache_size is {num_bytes / 2**30:.1f} GiB, but the host has"
            f" {available / 2**30:.1f} GiB of available memory; lower it"
        )
    return num_slots


def new_copies(storage: torch.Tensor, num_slots: int) -> StagedCopies:
    """Make the copier between an empty pool [num_blocks, bytes of a block] and slots in host
    memory.

    The slots are page-locked if the pool is on a GPU. Raises InsufficientMemoryError.
    """
    shape = (num_slots, storage.shape[1])
    if storage.device.type == "cpu":
        host = torch.zeros(shape, dtype=torch.uint8)
        lanes = (PlainLane(), PlainLane())
        return StagedCopies(storage, host, lanes, copy_pairs_in_turn, lambda: None)
    # Triton may be missing where there is no GPU.
    from quire.kernels.triton.attention.copy_blocks import copy_blocks

    memory, unlock = page_locked(num_slots * storage.shape[1], storage.device)
    streams = (CudaLane(storage.device), CudaLane(storage.device))
    copies = StagedCopies(storage, memory.view(shape), streams, copy_blocks, unlock)
    copies.warm_up()
    return copies


def build_disk_tier(
    folder: CacheFolder,
    options: EngineOptions,
    rank: RankBuild,
    wake_up: Callable[[], None],
    storage: NDArray[np.uint8] | None = None,
) -> DiskTier:
    """A disk tier below `storage`, pages in host memory; None means the pool of a rank on the CPU.

    From now on the tier owns the folder. For `wake_up` see `DiskTier`. Raises ConfigurationError
    if the folder would be too small for this model or can't be read.
    """
    assert rank.fingerprint is not None, "with a folder, `build_rank` makes one"
    try:
        tier = DiskTier(
            folder,
            rank.fingerprint.digest,
            DiskBudget(options.cache_bytes, options.cache_bytes_per_day),
            rank.runner.kv_storage.numpy() if storage is None else storage,
            [group.stored_bytes for group in rank.own_layout.groups],
            wake_up,
        )
    except OSError as error:
        raise ConfigurationError(
            f"cache_dir {options.cache_dir!r} can't be read: {error.strerror or error}"
        ) from error
    if storage is None:
        # The first loads write to the pool's first blocks. Commit their memory now.
        rank.runner.touch_memory(tier.store.own_bytes, lambda: not tier.is_beside_steps)
    write_description(folder, rank.fingerprint)
    if len(tier.store.index) == 0 and folder.part.rank == 0:
        _explain_cold(folder, rank.fingerprint)
    return tier


def build_ranked_tiers(
    folder: CacheFolder,
    options: EngineOptions,
    rank: RankBuild,
    sockets: list[socket.socket],
    num_calls: Callable[[], int],
) -> Tiers:
    """The tiers of all ranks, driven by rank 0.

    Moves are sent to the other ranks over `sockets`. For `num_calls` see `RankedTiers`. Raises the
    errors of `build_disk_tier`, EngineDeadError if a rank has died, and ConfigurationError on GPUs.
    On a GPU a call returns before its reads and writes are done, so counting calls does not order
    moves (see `tiers.rank_service`).
    """
    assert rank.fingerprint is not None, "with a folder, `build_rank` makes one"
    if rank.device.type != "cpu":
        raise ConfigurationError(
            f"cache_dir is {options.cache_dir!r}, but tensor_parallel_size is"
            f" {options.tensor_parallel_size} on GPUs: the cache on disk is served for several"
            " ranks on the CPU only in this version; leave one of them out"
        )
    changed = threading.Event()
    links = [RankLink(number, sock) for number, sock in enumerate(sockets, 1)]
    descriptions = [rank.fingerprint.to_json(), *(link.description for link in links)]
    local = _build_share(folder, options, rank, 0, descriptions, changed.set)
    try:
        for link in links:
            link.open(descriptions, changed.set)
    except BaseException:
        local.close(0.0)
        raise
    return RankedTiers(local, links, num_calls, changed)


def rank_service(
    sock: socket.socket, lock: int, options: EngineOptions, rank: RankBuild, number: int
) -> RankService:
    """The service that carries out moves on rank `number` (1 or higher), which is built.

    `sock` is connected to rank 0. `lock` is the descriptor of the folder's lock, inherited from
    rank 0.
    """
    assert options.cache_folder is not None and rank.fingerprint is not None
    folder = CacheFolder.join(options.cache_folder, lock, _files())
    open_tier = partial(_build_share, folder, options, rank, number)
    return RankService(sock, rank.fingerprint.to_json(), open_tier)


def _build_share(
    folder: CacheFolder,
    options: EngineOptions,
    rank: RankBuild,
    number: int,
    descriptions: list[bytes],
    wake_up: Callable[[], None],
) -> DiskTier:
    fingerprints = joined([Fingerprint.from_json(each) for each in descriptions])
    live = frozenset(each.digest for each in fingerprints)
    folder.part = RankPart(number, len(fingerprints), live)
    return build_disk_tier(
        folder, options, replace(rank, fingerprint=fingerprints[number]), wake_up
    )


def _explain_cold(folder: CacheFolder, fingerprint: Fingerprint) -> None:
    """Log why existing contents of the folder can't be used, such as an upgrade or a changed
    option."""
    try:
        nearest = nearest_description(folder, fingerprint)
    except OSError as error:
        logger.warning("%s: the blocks stored there can't be listed: %s", folder.path, error)
        return
    if nearest is None:
        return
    differences = fingerprint.differences(nearest)
    more = len(differences) - MOST_DIFFERENCES
    logger.info(
        "%s: what is kept there was computed otherwise (%s), so the cache begins empty: %s%s",
        *(folder.path, nearest.label, "; ".join(differences[:MOST_DIFFERENCES])),
        f"; and {more} more differences" if more > 0 else "",
    )
