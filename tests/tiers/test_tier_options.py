"""The options of the disk tier: what follows from the folder alone, and what is too small."""

from pathlib import Path

import pytest

from quire.cli.flags import engine_options
from quire.cli.parser import build_parser
from quire.options.engine_options import EngineOptions
from quire.tiers.tier_options import TierOptions

GIB = 1 << 30


def test_the_folder_alone_turns_the_tier_on() -> None:
    options = EngineOptions.from_mapping({"cache_dir": Path("a") / "b"})
    assert options.cache_folder == Path("a/b")
    assert (options.cache_bytes, options.cache_bytes_per_day) == (20 * GIB, 200 * GIB)
    assert EngineOptions().cache_folder is None


def test_sizes_are_bytes_or_text() -> None:
    options = EngineOptions.from_mapping({"cache_dir": "a", "cache_size": "1GiB"})
    assert (options.cache_bytes, options.cache_bytes_per_day) == (GIB, 10 * GIB)
    options = EngineOptions.from_mapping({"cache_dir": "a", "cache_writes_per_day": "3MB"})
    assert (options.cache_bytes, options.cache_bytes_per_day) == (20 * GIB, 3_000_000)
    options = EngineOptions.from_mapping({"cache_dir": "a", "cache_writes_per_day": 0})
    assert options.cache_bytes_per_day == 0


def test_tier_options_are_flags_and_reach_another_process_unchanged() -> None:
    words = "serve --cache-dir a --cache-size 1GiB --cache-writes-per-day 2GiB"
    options = EngineOptions.from_mapping(engine_options(build_parser().parse_args(words.split())))
    assert EngineOptions.from_mapping(options.as_mapping()) == options
    assert TierOptions(**options.part(TierOptions)) == TierOptions("a", GIB, 2 * GIB)


def test_a_home_folder_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert TierOptions("~/cache").cache_folder == Path("/home/somebody/cache")


def test_a_disk_tier_has_host_memory_by_default() -> None:
    assert EngineOptions.from_mapping({"cache_dir": "a"}).host_cache_bytes == GIB // 4
    options = EngineOptions.from_mapping({"host_cache_size": "8GiB"})
    assert (options.host_cache_size, options.host_cache_bytes) == (8 * GIB, 8 * GIB)
    assert EngineOptions.from_mapping(options.as_mapping()) == options


def test_the_help_says_that_a_cpu_has_no_host_tier(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "--cache-dir FOLDER folder that keeps cached prefixes on disk" in printed
    assert "--host-cache-size SIZE page-locked host memory" in printed
    assert "Refused on a CPU, where the KV cache itself is host memory" in printed
