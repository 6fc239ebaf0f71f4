"""`quire cache`: what it says of a folder, what it finds damaged, and what it removes."""

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.cli import cache
from quire.cli.main import main
from quire.core.memory.tiers.contract import StoreOrder
from quire.tiers.disk.folder import CacheFolder
from quire.tiers.disk.store import SegmentStore
from quire.tiers.fingerprint import Fingerprint, read_description, write_description

Capture = pytest.CaptureFixture[str]

MODEL = Fingerprint(
    weights="ab" * 16,
    model={"architecture": "LlamaForCausalLM"},
    pages={"block_size": 16},
    numerics={"dtype": "torch.bfloat16", "kernels": "avx2", "quantization": None},
    code={},
    label="org/model",
)
OTHER = replace(MODEL, weights="cd" * 16, label="org/other")
PAGE_BYTES = 1000


def fill(folder: CacheFolder, fingerprint: Fingerprint, num_blocks: int) -> SegmentStore:
    """Blocks of two groups, and a partly filled one; not sealed."""
    store = SegmentStore(folder, fingerprint.digest, 1 << 24)
    orders = [StoreOrder(i, 0, i % 2, bytes([i]) * 16) for i in range(num_blocks)]
    orders.append(StoreOrder(99, 0, 0, b"t" * 18, b"p" * 16, b"abcd"))
    pages = [memoryview(bytes([order.order_id]) * PAGE_BYTES) for order in orders]
    store.append(orders, pages)
    write_description(folder, fingerprint)
    return store


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """The command sets logging up for its process; here that is the process of all tests."""
    logger = logging.getLogger("quire")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    path = tmp_path / "cache"
    folder = CacheFolder.open(path)
    fill(folder, MODEL, 5).seal()
    fill(folder, OTHER, 2)  # as after a kill: it has no footer
    (path / "notes.txt").write_text("somebody's")
    folder.close()
    return path


def run(capsys: Capture, *words: str) -> tuple[int, str]:
    code = main(["cache", *words])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def asked(capsys: Capture, *words: str) -> dict[str, Any]:
    code, printed = run(capsys, *words, "--json")
    found: dict[str, Any] = json.loads(printed)
    return {"code": code, **found}


def test_inspect_lists_the_namespaces(filled: Path, capsys: Capture) -> None:
    code, printed = run(capsys, "inspect", str(filled))
    first, *lines = printed.splitlines()
    assert code == 0
    assert first.startswith(f"{filled}: ") and first.endswith("namespaces: 2; no engine uses it")
    about = lines[lines.index(f"{MODEL.digest.hex()}  org/model") :]
    assert "in 1 segments, last written 2" in about[1] and "sealed" not in about[1]
    assert about[2] == "  records: 4 of group 0, 2 of group 1; partly filled blocks: 1"
    assert about[3] == "  model LlamaForCausalLM, dtype bfloat16, kernels avx2, block_size 16"
    other = lines[lines.index(f"{OTHER.digest.hex()}  org/other") :]
    assert other[1].endswith("; 1 not sealed")


def test_inspect_lists_the_namespaces_as_json(filled: Path, capsys: Capture) -> None:
    found = asked(capsys, "inspect", str(filled))
    assert (found["code"], found["holder"]) == (0, None)
    by_name = {each["fingerprint"]: each for each in found["namespaces"]}
    assert set(by_name) == {MODEL.digest.hex(), OTHER.digest.hex()}
    about = by_name[MODEL.digest.hex()]
    assert about["num_records"] == {"0": 4, "1": 2}
    assert about["payload_bytes"] == 6 * PAGE_BYTES
    assert about["description"] == json.loads(MODEL.to_json())
    sizes = [path.stat().st_size for path in filled.rglob("*.seg")]
    assert found["num_bytes"] == sum(sizes)


def test_a_folder_that_is_in_use_can_be_looked_at_but_no_more(
    filled: Path, capsys: Capture
) -> None:
    folder = CacheFolder.open(filled)
    fill(folder, replace(MODEL, label="third", code={"x": "y"}), 3)
    found = asked(capsys, "inspect", str(filled))
    assert len(found["namespaces"]) == 3
    # Where the kernel lists no locks, or none of this device, nobody is seen.
    assert found["holder"] in (os.getpid(), None)
    for action in ("verify", "empty"):
        code, printed = run(capsys, action, str(filled))
        assert code == 1
        assert f"is in use by process {os.getpid()}" in printed
    folder.close()
    assert asked(capsys, "verify", str(filled))["code"] == 0


def test_the_holder_is_found_among_all_locks(
    filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, locks = (filled / "lock").stat(), tmp_path / "locks"
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    others = [
        f"1: POSIX  ADVISORY  WRITE 11 {device}:{status.st_ino} 0 EOF",
        f"2: FLOCK  ADVISORY  WRITE 12 ff:fe:{status.st_ino} 0 EOF",
        f"3: FLOCK  ADVISORY  WRITE {status.st_ino} {device}:77 0 EOF",
        f"3: -> FLOCK  ADVISORY  WRITE 13 {device}:{status.st_ino} 0 EOF",
    ]
    own = f"4: FLOCK  ADVISORY  WRITE 4242 {device}:{status.st_ino} 0 EOF"
    monkeypatch.setattr(cache, "_ALL_LOCKS", locks)
    locks.write_text("\n".join(others))
    assert cache.holder_of(filled) is None
    locks.write_text("\n".join([*others, own]))
    assert cache.holder_of(filled) == 4242
    locks.unlink()
    assert cache.holder_of(filled) is None


def test_every_record_is_checked(filled: Path, capsys: Capture) -> None:
    assert asked(capsys, "verify", str(filled))["num_records"] == 9
    code, printed = run(capsys, "verify", str(filled))
    assert code == 0 and printed.startswith("9 records, 8.8 KiB, read in ")
    assert printed.endswith(": all sound\n")
    path = filled / MODEL.digest.hex() / "00000001.seg"
    content = bytearray(path.read_bytes())
    content[content.index(bytes([3]) * PAGE_BYTES) + 7] ^= 1
    path.write_bytes(content)
    found = asked(capsys, "verify", str(filled))
    assert (found["code"], found["damaged"]) == (1, [f"{path}: 1/{'03' * 16}"])
    code, printed = run(capsys, "verify", str(filled))
    assert code == 1 and ": damaged\n" in printed and f"damaged: {path}: 1/0303" in printed


def test_headers_are_checked_where_there_is_a_footer(filled: Path, capsys: Capture) -> None:
    """Without one, nobody can tell damage from a write that was cut off."""
    path = filled / MODEL.digest.hex() / "00000001.seg"
    torn = filled / OTHER.digest.hex() / "00000001.seg"
    for each in (path, torn):
        content = bytearray(each.read_bytes())
        content[content.index(bytes([1]) * PAGE_BYTES) - 100] ^= 1  # in the second record's header
        each.write_bytes(content)
    found = asked(capsys, "verify", str(filled))
    assert (found["code"], found["damaged"], found["num_records"]) == (1, [f"{path}: headers"], 7)
    size = torn.stat().st_size
    assert found["unread"] == [f"{torn}: {size - 64 - 128 - 1024}"]
    path.unlink()
    code, printed = run(capsys, "verify", str(filled))
    assert code == 0 and f"cut off by a kill, or damaged: {torn}: " in printed


def test_a_damaged_secret_is_not_replaced(filled: Path, capsys: Capture) -> None:
    """It may come back from a backup, while one that was made anew finds nothing."""
    for content in (b"damaged", None):
        if content is None:
            (filled / "secret").unlink()
        else:
            (filled / "secret").write_bytes(content)
        for action in ("inspect", "verify", "empty"):
            assert asked(capsys, action, str(filled))["code"] == 0
        assert not (filled / "secret").exists() or (filled / "secret").read_bytes() == content


def test_a_segment_of_another_place_is_named(filled: Path, capsys: Capture) -> None:
    path = filled / MODEL.digest.hex() / "00000007.seg"
    path.write_bytes((filled / OTHER.digest.hex() / "00000001.seg").read_bytes())
    found = asked(capsys, "verify", str(filled))
    assert (found["code"], found["foreign"]) == (1, [str(path)])
    about = {each["label"]: each for each in asked(capsys, "inspect", str(filled))["namespaces"]}
    assert about["org/model"]["num_foreign"] == 1


def test_empty_removes_segments_and_nothing_else(filled: Path, capsys: Capture) -> None:
    secret = (filled / "secret").read_bytes()
    (filled / OTHER.digest.hex() / "mine").write_text("not a segment")
    found = asked(capsys, "empty", str(filled))
    assert (found["code"], found["num_files"]) == (0, 4)
    left = sorted(path.name for path in filled.iterdir())
    assert left == sorted([OTHER.digest.hex(), "lock", "notes.txt", "secret"])
    assert (filled / "secret").read_bytes() == secret
    code, printed = run(capsys, "empty", str(filled))
    assert (code, printed) == (0, "removed 0 files, 0 B\n")


@pytest.mark.parametrize("action", ["inspect", "verify", "empty"])
def test_files_that_only_have_a_segment_name_are_left_alone(
    action: str, filled: Path, capsys: Capture
) -> None:
    aim = filled.parent / "somebody's"
    aim.mkdir()
    (aim / "00000001.seg").write_text("precious")
    namespace = filled / MODEL.digest.hex()
    os.mkfifo(namespace / "00000005.seg")
    (namespace / "00000006.seg").mkdir()
    (namespace / "00000007.seg").symlink_to(aim / "00000001.seg")
    (namespace / "99999999999.seg").write_text("precious")
    (filled / ("ab" * 16)).symlink_to(aim)
    (filled / ("cd" * 16)).write_text("precious")
    os.mkfifo(filled / f"{'ef' * 16}.json")
    (filled / f"{MODEL.digest.hex()}.json").unlink()
    os.mkfifo(filled / f"{MODEL.digest.hex()}.json")
    assert asked(capsys, action, str(filled))["code"] == 0
    assert len(list(namespace.iterdir())) == 4 + (action != "empty")
    assert (aim / "00000001.seg").read_text() == "precious"


@pytest.mark.parametrize("action", ["inspect", "verify", "empty"])
def test_a_folder_that_is_none_of_ours_is_left_alone(
    action: str, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "00000001.seg").write_text("somebody's")
    code, printed = run(capsys, action, str(tmp_path))
    assert code == 1 and "is no cache folder" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["00000001.seg"]
    code, printed = run(capsys, action, str(tmp_path / "none"))
    assert code == 1 and printed.endswith("none is no folder\n")
    assert not (tmp_path / "none").exists()


def test_descriptions_go_with_what_they_describe(filled: Path) -> None:
    name, gone = MODEL.digest.hex(), OTHER.digest.hex()
    for path in (filled / gone).iterdir():
        path.unlink()
    (filled / gone).rmdir()
    (filled / f"{gone}.json.new").write_text("torn")
    folder = CacheFolder.open(filled)
    write_description(folder, MODEL)
    folder.close()
    assert sorted(path.name for path in filled.glob("*.json*")) == [f"{name}.json"]
    (filled / f"{name}.json").write_text("{}")
    assert read_description(filled, name) is None
    folder = CacheFolder.open(filled)
    write_description(folder, MODEL)
    folder.close()
    assert read_description(filled, name) == MODEL
    assert (filled / f"{name}.json").stat().st_mode & 0o777 == 0o600


def test_a_description_under_another_name_is_none(filled: Path) -> None:
    other = "0" * 32
    (filled / f"{MODEL.digest.hex()}.json").rename(filled / f"{other}.json")
    assert read_description(filled, other) is None
