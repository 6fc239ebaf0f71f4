"""Large files: what was cut off is gone on with, in the same process and in the next one."""

import fnmatch
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from contextlib import suppress
from pathlib import Path

import pytest
from tests.hub.conftest import CHUNK_BYTES, SHARDS

from quire.errors import CheckpointError
from quire.hub.model_folder import resolve_model_folder

SIZES = (300_000, 200_000)


def _partials(cache):
    sizes = []
    # os.walk passes over folders that another process removes meanwhile; Path.rglob raises.
    for folder, _, names in os.walk(cache):
        for name in fnmatch.filter(names, "*.incomplete"):
            with suppress(FileNotFoundError):  # another process may have completed it meanwhile
                sizes.append((Path(folder) / name).stat().st_size)
    return sorted(sizes)


def _assert_whole(hub, cache):
    folder = resolve_model_folder("org/model")
    for name in SHARDS:
        assert (folder / name).read_bytes() == hub.files[name]
    assert not _partials(cache)


def test_after_a_cut_the_rest_is_fetched(hub, cache):
    hub.cut_after += [100_000, 50_000]
    del hub.files["model.safetensors.index.json"]
    hub.files["model.safetensors"] = hub.files.pop(SHARDS[0])
    folder = resolve_model_folder("org/model")
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    assert hub.ranges("model.safetensors") == [None, "bytes=100000-", "bytes=150000-"]


def test_progress_counts_bytes_of_all_files(hub):
    seen = []
    resolve_model_folder("org/model", on_progress=lambda *report: seen.append(report))
    assert {(text, total) for text, _, total in seen} == {("downloading org/model", sum(SIZES))}
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][1] == sum(SIZES)


def test_bytes_fetched_by_a_killed_process_are_kept(hub, cache, tmp_path):
    hub.stall = threading.Event()
    hub.cut_after += [120_000, 80_000]
    code = (
        "from huggingface_hub import constants;"
        f"constants.DOWNLOAD_CHUNK_SIZE = {CHUNK_BYTES};"
        "from quire.hub.model_folder import resolve_model_folder as f; f('org/model')"
    )
    environment = os.environ | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as process:
        until_s = time.monotonic() + 60
        while sum(_partials(cache)) < 180_000 and time.monotonic() < until_s:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    hub.stall.set()
    kept = {
        name: (cache / "models--org--model" / "blobs" / f"{hub.etag(name)}.incomplete")
        .stat()
        .st_size
        for name in SHARDS
    }
    assert sum(kept.values()) >= 100_000
    hub.requests.clear()
    _assert_whole(hub, cache)
    for name in SHARDS:
        assert hub.ranges(name) == [f"bytes={kept[name]}-" if kept[name] else None]


def test_a_ctrl_c_keeps_what_has_come(hub, cache):
    hub.cut_after += [100_000, 60_000]

    def interrupt(text, done, total):
        if done >= 160_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve_model_folder("org/model", on_progress=interrupt)
    assert _partials(cache) == [60_000, 100_000]
    _assert_whole(hub, cache)


def _leave_partial(hub, cache, content):
    path = cache / "models--org--model" / "blobs" / f"{hub.etag(SHARDS[0])}.incomplete"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)


def test_a_partial_file_of_something_else_is_thrown_away(hub, cache):
    _leave_partial(hub, cache, b"x" * 1000)
    with pytest.raises(CheckpointError, match=r"don't match.*try again"):
        resolve_model_folder("org/model")
    _assert_whole(hub, cache)


@pytest.mark.parametrize("size", [SIZES[0], SIZES[0] + 1])
def test_a_partial_file_may_be_whole_or_too_long(size, hub, cache):
    _leave_partial(hub, cache, (hub.files[SHARDS[0]] + b"x")[:size])
    _assert_whole(hub, cache)
    assert hub.ranges(SHARDS[0]) == ([] if size == SIZES[0] else [None])


def test_a_server_without_ranges_sends_all_again(hub, cache):
    _leave_partial(hub, cache, hub.files[SHARDS[0]][:1000])
    hub.takes_ranges = False
    _assert_whole(hub, cache)
    assert hub.ranges(SHARDS[0]) == ["bytes=1000-"]


def test_too_little_disk_is_said_before_weights_are_fetched(hub, cache, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**9, 10**9, 1 << 20))
    with pytest.raises(CheckpointError, match=r"needs 500000 bytes more .* 1048576 are free"):
        resolve_model_folder("org/model")
    assert not {*hub.fetched()} & {*SHARDS}


def test_a_model_is_fetched_once_by_two_at_a_time(hub, cache):
    hub.cut_after += [100_000, 100_000]  # a second each
    threads = [threading.Thread(target=resolve_model_folder, args=("org/model",)) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _assert_whole(hub, cache)
    assert len(hub.ranges(SHARDS[0])) == 2
