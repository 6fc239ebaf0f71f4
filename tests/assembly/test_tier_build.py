"""The cache folder of an engine that is built: its lock, its secret, and a rank's pages on disk."""

import errno
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.assembly import tier_build
from quire.assembly.build import build_engine
from quire.assembly.model_kind import choose_kind
from quire.assembly.rank_build import RankBuild, build_rank
from quire.assembly.tier_build import (
    build_disk_tier,
    build_tiers,
    cache_folder,
    check_host_tier,
    secret_of,
)
from quire.core.memory.tiers.contract import LoadOrder, MoveEnd, StoreOrder
from quire.errors import ConfigurationError, InsufficientMemoryError
from quire.options.engine_options import EngineOptions
from quire.tiers.disk.disk_tier import DiskTier
from quire.tiers.disk.files import Files
from quire.tiers.disk.folder import CacheFolder
from quire.tiers.fingerprint import read_description
from quire.tiers.host.host_tier import HostTier
from quire.tiers.stack import TierStack


@pytest.fixture
def options(tmp_path: Path) -> EngineOptions:
    return options_of(tmp_path / "cache")


def options_of(folder: Path, **changes: Any) -> EngineOptions:
    small = {"kv_cache_memory": "2MiB", "max_num_seqs": 2, "cache_size": "64MiB"}
    return EngineOptions.from_mapping({"cache_dir": folder, **small, **changes})


def rank_of(options: EngineOptions) -> RankBuild:
    kind = choose_kind(options)
    return build_rank(kind.options, kind.folder, kind.config, None, None, lambda *_: None)


def ended(tier: DiskTier, woken: threading.Event) -> list[MoveEnd]:
    for _ in range(500):
        if found := tier.ended():
            return found
        woken.wait(0.02)
        woken.clear()
    raise AssertionError("nothing ended")


def check_touched(rank: RankBuild, tier: DiskTier) -> None:
    """As much of the pool's memory was asked for as the folder has of this model: the whole pages,
    or none where the system gives memory only as it is written."""
    touch = rank.runner._kv_cache._first_touch
    assert touch is not None
    touch._thread.join(60.0)
    wanted = tier.store.own_bytes // mmap.PAGESIZE * mmap.PAGESIZE
    assert wanted > 0 and touch.num_bytes_touched in (wanted, 0)


def test_the_secret_is_the_folder_s(options: EngineOptions) -> None:
    found = []
    for _ in range(2):
        with cache_folder(options) as folder:
            assert folder is not None
            found.append(secret_of(folder))
        folder.close()
    assert found[0] == found[1]
    with cache_folder(EngineOptions()) as none:
        assert none is None
    assert len({secret_of(None), secret_of(None), found[0]}) == 3


def test_a_folder_is_one_engine_s_until_that_is_gone(
    options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_build, "TAKE_OVER_S", 0.1)
    with cache_folder(options) as folder:
        assert folder is not None
        with pytest.raises(ConfigurationError, match="is in use by process"), cache_folder(options):
            pass
    folder.close()
    with pytest.raises(KeyError), cache_folder(options):
        raise KeyError("the engine could not be built")
    with cache_folder(options) as folder:  # which was closed
        assert folder is not None
    folder.close()


def test_pages_are_found_again_by_the_next_engine(options: EngineOptions) -> None:
    page = torch.arange(256).to(torch.uint8)
    woken = threading.Event()
    for is_restarted in (False, True):
        with cache_folder(options) as folder:
            assert folder is not None
            rank = rank_of(options)
            tier = build_disk_tier(folder, options, rank, woken.set)
        storage = rank.runner.kv_storage
        assert tier.find(0, b"name") == is_restarted
        if not is_restarted:
            storage[3] = page.repeat(storage.shape[1] // 256)
            tier.start([StoreOrder(1, 3, 0, b"name")], [])
            assert ended(tier, woken) == [MoveEnd(1, True)]
        else:
            check_touched(rank, tier)
            tier.start([], [LoadOrder(2, 5, 0, b"name")])
            assert ended(tier, woken) == [MoveEnd(2, True)]
            assert torch.equal(storage[5], page.repeat(storage.shape[1] // 256))
        tier.close()
    assert rank.fingerprint is not None and options.cache_folder is not None
    described = read_description(options.cache_folder, rank.fingerprint.digest.hex())
    assert described == rank.fingerprint


def test_why_nothing_is_found_is_logged(
    options: EngineOptions, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "quire")
    assert options.cache_folder is not None
    woken = threading.Event()
    for changes in ({}, {"block_size": 32}, {}):
        changed = options_of(options.cache_folder, **changes)
        caplog.clear()
        with cache_folder(changed) as folder:
            assert folder is not None
            tier = build_disk_tier(folder, changed, rank_of(changed), woken.set)
        tier.start([StoreOrder(1, 0, 0, b"name")], [])
        ended(tier, woken)
        tier.close()
        said = [text for text in caplog.messages if "computed otherwise" in text]
        assert len(said) == bool(changes)
        assert all("pages.block_size is 32 instead of 16" in text for text in said)


def test_a_budget_of_no_writes_reads_only(options: EngineOptions) -> None:
    woken = threading.Event()
    assert options.cache_folder is not None
    reading = options_of(options.cache_folder, cache_writes_per_day=0)
    with cache_folder(reading) as folder:
        assert folder is not None
        tier = build_disk_tier(folder, reading, rank_of(reading), woken.set)
    assert not tier.takes_stores
    tier.start([StoreOrder(1, 3, 0, b"name")], [])
    assert ended(tier, woken) == [MoveEnd(1, False)]
    tier.close()
    assert list(options.cache_folder.rglob("*.seg")) == []


def test_a_folder_that_is_too_small_for_the_model_is_refused(options: EngineOptions) -> None:
    assert options.cache_folder is not None
    small = options_of(options.cache_folder, cache_size="1MiB")
    with (
        pytest.raises(ConfigurationError, match=r"cache_size is 1048576 bytes, but blocks of"),
        cache_folder(small) as folder,
    ):
        assert folder is not None
        build_disk_tier(folder, small, rank_of(small), lambda: None)
    with cache_folder(options) as folder:
        assert folder is not None
    folder.close()


def test_a_host_tier_is_refused_where_the_pool_is_the_host_s_memory() -> None:
    given = {"host_cache_size": "64MiB", "device": "cpu"}
    with pytest.raises(ConfigurationError, match=r"host_cache_size is 67108864, but on a CPU"):
        build_engine(given)
    check_host_tier(EngineOptions.from_mapping(given | {"kernels": "triton"}))
    check_host_tier(EngineOptions.from_mapping({"device": "cpu"}))


@pytest.mark.parametrize("has_folder", [False, True])
def test_with_a_host_tier_the_disk_works_on_its_slots(
    options: EngineOptions, *, has_folder: bool
) -> None:
    assert options.cache_folder is not None
    given = options_of(options.cache_folder, host_cache_size="2MiB")
    if not has_folder:
        given = EngineOptions.from_mapping({"kv_cache_memory": "2MiB", "host_cache_size": "2MiB"})
    with cache_folder(given) as folder:
        rank = rank_of(given)
        tiers = build_tiers(folder, given, rank, lambda: None)
    assert isinstance(tiers, TierStack if has_folder else HostTier)
    counts = tiers.counts()
    page_bytes = rank.layout.bytes_per_block
    assert counts["host"]["pinned_bytes"] == (2 << 20) // page_bytes * page_bytes
    assert set(counts) == ({"host", "disk"} if has_folder else {"host"})
    tiers.close()


def test_a_host_tier_has_bounds(options: EngineOptions) -> None:
    rank = rank_of(EngineOptions.from_mapping({"kv_cache_memory": "2MiB"}))
    small = EngineOptions.from_mapping({"host_cache_size": "1MiB", "block_size": 2048})
    large = EngineOptions.from_mapping({"host_cache_size": 1 << 60})
    with pytest.raises(InsufficientMemoryError, match="of available memory; lower it"):
        build_tiers(None, large, rank, lambda: None)
    rank = rank_of(EngineOptions.from_mapping({"kv_cache_memory": "64MiB", "block_size": 2048}))
    with pytest.raises(ConfigurationError, match="give a larger host_cache_size"):
        build_tiers(None, small, rank, lambda: None)
    assert build_tiers(None, EngineOptions(), rank, lambda: None) is None


def test_a_folder_that_cannot_be_listed_is_refused(options: EngineOptions) -> None:
    class Unlisted(Files):
        def names(self, folder: Path) -> list[str]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    assert options.cache_folder is not None
    folder = CacheFolder.open(options.cache_folder, Unlisted())
    with pytest.raises(ConfigurationError, match="can't be read: Input/output error"):
        build_disk_tier(folder, options, rank_of(options), lambda: None)
    folder.close()
