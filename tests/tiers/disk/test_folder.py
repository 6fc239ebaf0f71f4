"""The cache folder: who holds it, its secret, its modes."""

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.tiers.disk.faulty_files import FaultyFiles, KilledError, disk_bytes, full_disk, read_only
from tests.tiers.disk.left_open import nothing_left_open
from tests.tiers.disk.store_world import FINGERPRINT, OTHER, Opened, names_in, read, write

from quire.errors import ConfigurationError
from quire.tiers.disk.folder import CacheFolder
from quire.tiers.disk.io_limits import Spent

HOLD = """
import sys
from pathlib import Path
from quire.tiers.disk.folder import CacheFolder
folder = CacheFolder.open(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o277)
    yield
    os.umask(before)


def test_a_second_process_is_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "quire")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with nothing_left_open(), pytest.raises(ConfigurationError) as refused:
        CacheFolder.open(tmp_path)
    assert str(tmp_path) in str(refused.value) and str(holder.pid) in str(refused.value)
    threading.Timer(0.1, holder.kill).start()
    CacheFolder.open(tmp_path, wait_s=60).close()
    assert caplog.messages == [f"{tmp_path}: waiting for process {holder.pid}, up to 60 s"]
    holder.communicate()
    CacheFolder.open(tmp_path).close()


def test_the_secret_stays(tmp_path: Path) -> None:
    first = CacheFolder.open(tmp_path / "a" / "b")
    first.close()
    second = CacheFolder.open(tmp_path / "a" / "b")
    other = CacheFolder.open(tmp_path / "c")
    assert first.secret == second.secret != other.secret and len(first.secret) == 16
    assert sorted(os.listdir(second.path)) == ["lock", "secret"]
    second.close()
    other.close()


def test_modes_do_not_depend_on_the_umask(tmp_path: Path, umask: None) -> None:
    opened = Opened(tmp_path / "new" / "cache")
    write(opened.store, range(3))
    opened.close()
    found = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
    assert len(found) == 6
    for path in found:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_a_kill_at_any_call_leaves_a_folder_that_can_be_opened(quick_path: Path) -> None:
    whole = FaultyFiles()
    CacheFolder.open(quick_path / "whole", whole).close()
    for kill_at in range(1, whole.num_calls + 1):
        path = quick_path / str(kill_at)
        files = FaultyFiles()
        files.kill_at = kill_at
        with pytest.raises(KilledError):
            CacheFolder.open(path, files).close()
        files.release()
        opened = CacheFolder.open(path)
        assert len(opened.secret) == 16
        assert sorted(os.listdir(path)) == ["lock", "secret"]
        opened.close()


def test_a_damaged_secret_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = CacheFolder.open(tmp_path)
    first.close()
    (tmp_path / "secret").write_bytes(first.secret[:7])
    second = CacheFolder.open(tmp_path)
    assert len(second.secret) == 16 and second.secret[:7] != first.secret[:7]
    assert "damaged" in caplog.text
    second.close()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="can't be used"):
        CacheFolder.open(tmp_path / "file" / "cache")
    files = FaultyFiles()
    files.errors["pwritev"] = full_disk()
    with nothing_left_open(), pytest.raises(ConfigurationError, match="No space left"):
        CacheFolder.open(tmp_path / "full", files)
    assert os.listdir(tmp_path / "full") == ["lock"]


def test_a_read_only_folder_can_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = Opened(tmp_path)
    write(before.store, range(1, 5))
    before.close()
    files = FaultyFiles()
    for name in ("open_to_write", "create", "pwritev", "truncate", "make_folder", "unlink"):
        files.errors[name] = read_only()
    del files.errors["make_folder"]  # makes nothing where all is there
    opened = Opened(tmp_path, files=files)
    [record] = caplog.records
    assert f"{tmp_path} is read-only: blocks are loaded" in record.getMessage()
    assert opened.folder.secret == before.folder.secret
    assert all(read(opened.store, names_in(opened.store, range(1, 5))))
    with pytest.raises(OSError, match="Read-only"):
        opened.store.prepare_to_write()
    opened.close()


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    namespace = tmp_path / FINGERPRINT.hex()
    namespace.mkdir()
    others = [
        tmp_path / "notes.txt",
        namespace / "00000001.seg.bak",
        namespace / "1.seg",
        namespace / "x0000001.seg",
    ]
    for path in others:
        path.write_bytes(b"mine")
    (tmp_path / "not-a-namespace").mkdir()
    opened = Opened(tmp_path, budget_bytes=20_000, segment_bytes=4000)
    for number in range(1, 50):
        write(opened.store, [number])
    opened.close()
    assert all(path.read_bytes() == b"mine" for path in others)
    assert (tmp_path / "not-a-namespace").is_dir()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def dead_link(path: Path) -> None:
    path.symlink_to("nowhere")


def link(path: Path) -> None:
    """To what must not be touched."""
    aim = path.parent.parent.parent / "somebody's"
    aim.mkdir(exist_ok=True)
    (aim / "00000001.seg").write_text("precious")
    path.symlink_to(aim if len(path.name) == 32 else aim / "00000001.seg")


@pytest.mark.parametrize("make", [pipe, Path.mkdir, dead_link, link, Path.touch])
@pytest.mark.parametrize(
    "place",
    ["namespace", "own/00000009.seg", "own/4294967295.seg", "own/99999999999.seg", "other/7.seg"],
)
def test_files_that_only_have_a_segment_name_are_left_alone(
    make: Callable[[Path], None], place: str, tmp_path: Path
) -> None:
    path = tmp_path / "a" / "cache"
    before = Opened(path)
    write(before.store, range(1, 4))
    before.close()
    names = {"own": FINGERPRINT.hex(), "other": OTHER.hex(), "7.seg": "00000007.seg"}
    stranger = path.joinpath(*(names.get(part, part) for part in place.split("/")))
    if place == "namespace":
        stranger = path / ("ab" * 16)
    stranger.parent.mkdir(exist_ok=True)
    make(stranger)
    opened = Opened(path, budget_bytes=20_000, segment_bytes=4000)
    assert len(opened.store.index) == 3
    opened.store.prepare_to_write()
    for number in range(10, 50):
        write(opened.store, [number])
    assert disk_bytes(path / FINGERPRINT.hex()) < 24_000
    opened.close()
    # An empty file is what a kill leaves of a segment: it may be removed.
    assert make is Path.touch or os.path.lexists(stranger)
    assert all(kept.read_text() == "precious" for kept in (tmp_path / "a").glob("somebody's/*"))


def test_a_file_that_a_link_points_to_is_not_written(tmp_path: Path) -> None:
    aim = tmp_path / "somebody's"
    aim.write_text("precious")
    for name in ("lock", "secret", "spent"):
        path = tmp_path / f"cache-{name}"
        path.mkdir()
        (path / name).symlink_to(aim)
        try:
            folder = CacheFolder.open(path)
        except ConfigurationError as error:
            assert name != "spent" and "symbolic links" in str(error)
        else:
            assert folder.read_spent() is None
            folder.write_spent(Spent(1, 2.0))
            assert folder.read_spent() == Spent(1, 2.0)
            folder.close()
        assert aim.read_text() == "precious"
    for name in ("secret.new", "spent.new"):
        (tmp_path / name).symlink_to("nowhere")
    folder = CacheFolder.open(tmp_path)
    folder.write_spent(Spent(1, 2.0))
    folder.close()
    os.mkfifo(tmp_path / "cache-secret" / "pipe")
    (tmp_path / "cache-secret" / "pipe").rename(tmp_path / "secret")
    with pytest.raises(ConfigurationError, match="can't be used"):
        CacheFolder.open(tmp_path)


def test_two_processes_make_the_folder_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = os.mkdir

    def second(path: Path, mode: int) -> None:
        monkeypatch.undo()
        mkdir(path, mode)
        os.mkdir(path, mode)

    monkeypatch.setattr(os, "mkdir", second)
    CacheFolder.open(tmp_path / "new" / "cache").close()


@pytest.mark.parametrize(("mode", "warns"), [(0o700, 0), (0o755, 0), (0o770, 1), (0o777, 1)])
def test_a_folder_that_others_can_write_to_is_told_of(
    mode: int, warns: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, link = tmp_path / "cache", tmp_path / "link"
    path.mkdir()
    path.chmod(mode)
    link.symlink_to(path)
    CacheFolder.open(link).close()
    assert caplog.text.count(f"has mode {mode:o}") == warns


def test_a_fingerprint_has_sixteen_bytes(tmp_path: Path) -> None:
    folder = CacheFolder.open(tmp_path)
    with pytest.raises(ValueError, match="16 bytes"):
        folder.namespace(b"short")
    folder.close()


def test_half_written_files_of_the_daily_budget_are_removed(tmp_path: Path) -> None:
    CacheFolder.open(tmp_path).close()
    (tmp_path / "spent.new").write_bytes(b"half")
    CacheFolder.open(tmp_path).close()
    assert not (tmp_path / "spent.new").exists()


def test_the_days_bytes_are_read_though_their_file_closes_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CacheFolder.open(tmp_path)
    folder.write_spent(Spent(4096, 5.0))

    def fail(descriptor: int) -> None:
        os.close(descriptor)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(folder.files, "close", fail)
        assert folder.read_spent() == Spent(4096, 5.0)
    folder.close()
