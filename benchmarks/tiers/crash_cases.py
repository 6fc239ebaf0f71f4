"""The lines of the crash matrix: what is done to cache folders and to engines on them."""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.tiers import trial_files
from benchmarks.tiers.engine_lives import BUDGET_BYTES, OTHER, Life, Lives
from benchmarks.tiers.trial_files import MOMENTS, Trial

SEGMENT_BYTES = BUDGET_BYTES // 8
SECTOR = 512
Case = Callable[["Matrix"], None]
CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    """A decorator that registers a case under the name of its line."""

    def add(function: Case) -> Case:
        CASES[name] = function
        return function

    return add


class Matrix:
    """State that all lines share: folders that a life has left, and counts of results.

    is_short: a few ways of each line; of those that a unit test has too, none.
    """

    def __init__(self, lives: Lives, *, is_short: bool) -> None:
        self.lives, self.is_short = lives, is_short
        self.num_ways = 0
        self._came: Counter[str] = Counter()
        self._templates: dict[bool, Path] = {}

    def begin(self) -> None:
        """A new line."""
        self.num_ways = 0
        self._came.clear()

    def summary(self) -> str:
        return ", ".join(f"{count} {what}" for what, count in sorted(self._came.items()))

    def few(self, ways: Sequence[Any], num_short: int = 2, num_whole: int = 1 << 30) -> list[Any]:
        """All of them, or as many, evenly over them."""
        count = min(num_short if self.is_short else num_whole, len(ways))  # may be none
        return [ways[index * len(ways) // count] for index in range(count)]

    def left(self, *, sealed: bool) -> Path:
        """A folder with blocks of another namespace, and of a life that has ended in order or by
        kill -9."""
        if sealed not in self._templates:
            folder = self.lives.new_folder()
            self.ends(Life(folder, options=OTHER, seed=7))
            if sealed:
                self.ends(Life(folder))
            else:
                child = self.lives.begin(Life(folder, closes=False))
                child.wait_for("stored")
                child.kill()
                child.wait()
            self._templates[sealed] = folder
        return self._templates[sealed]

    @contextmanager
    def folder(self, *, sealed: bool = False, is_empty: bool = False) -> Iterator[Path]:
        """A copy, for one way in which something goes wrong."""
        path = self.lives.new_folder(None if is_empty else self.left(sealed=sealed))
        self.num_ways += 1
        try:
            yield path
        finally:
            if path.exists():
                self.lives.drop(path)

    def ends(self, life: Life) -> dict[str, Any]:
        """It was not killed, and nothing that it brought was wrong."""
        result = self.lives.live(life)
        assert result is not None
        return result

    def serves(self, life: Life) -> dict[str, Any]:
        """It was not refused either; and the folder keeps its budget."""
        result = self.ends(life)
        assert "refused" not in result, result["refused"]
        if life.folder is not None:
            used = sum(path.stat().st_size for path in life.folder.glob("*/*.seg"))
            assert used <= BUDGET_BYTES + SEGMENT_BYTES, f"{used} bytes are more than the budget"
        self.note("tokens loaded", result.get("loaded", 0))
        return result

    def note(self, what: str, count: int = 1) -> None:
        if count:
            self._came[what] += count


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.seg"))


# ---- the process ends ----------------------------------------------------------------------------


def kill_at_each_call(matrix: Matrix, moment: str) -> None:
    """Two rounds of prompts on a folder that is nearly full, so that segments are evicted."""
    with matrix.folder() as folder:
        life = Life(folder, Trial(), seed=2, num_rounds=2)
        num_changes = matrix.serves(life)["changes"]
    assert num_changes > 40, "little was written"
    for kill_at in matrix.few(range(1, num_changes + 1), 1):
        with matrix.folder() as folder:
            trial = Trial(kill_at=kill_at, moment=moment)
            result = matrix.lives.live(replace(life, folder=folder, trial=trial))
            matrix.note("killed" if result is None else "over before", 1)
            after = matrix.serves(Life(folder, seed=1))
            assert after["disk"]["damaged"] == 0, "what was found was not whole"
            assert not list(folder.rglob("*.new")), "a temporary file is left"


for _moment in MOMENTS:
    CASES[f"kill -9 {_moment} each change"] = partial(kill_at_each_call, moment=_moment)


@case("kill -9 while a folder is made")
def _(matrix: Matrix) -> None:
    for moment in MOMENTS:
        for kill_at in matrix.few(range(1, 14), 0):
            with matrix.folder(is_empty=True) as folder:
                matrix.lives.live(Life(folder, Trial(kill_at=kill_at, moment=moment)))
                matrix.serves(Life(folder))
                assert len((folder / "secret").read_bytes()) == 16


@case("kill -9, three engines one after the other")
def _(matrix: Matrix) -> None:
    for kill_at in matrix.few(range(3, 60, 4), 1):
        with matrix.folder() as folder:
            for number in range(3):
                trial = Trial(kill_at=kill_at + 5 * number, moment=MOMENTS[number])
                matrix.lives.live(Life(folder, trial, seed=number, num_rounds=2))
            matrix.serves(Life(folder))


# ---- files are damaged ---------------------------------------------------------------------------


def damaged_lives(matrix: Matrix, damage: Callable[[Path, int], None], num_whole: int) -> None:
    """damage: of a file, at an offset. Before an engine starts."""
    for sealed in matrix.few((False, True), 1):
        sectors = [
            (index, offset)
            for index, path in enumerate(segments(matrix.left(sealed=sealed)))
            for offset in range(0, path.stat().st_size, SECTOR)
        ]
        for index, offset in matrix.few(sectors, 1, num_whole):
            with matrix.folder(sealed=sealed) as folder:
                damage(segments(folder)[index], offset)
                result = matrix.serves(Life(folder))
                matrix.note("blocks damaged", result["disk"]["damaged"])
                matrix.serves(Life(folder))


@case("a file is cut off, at 512 bytes each")
def _(matrix: Matrix) -> None:
    damaged_lives(matrix, lambda path, offset: os.truncate(path, offset), 60)


@case("512 bytes were never written")
def _(matrix: Matrix) -> None:
    damaged_lives(matrix, lambda path, offset: patch(path, offset, bytes(SECTOR)), 60)


@case("a bit is flipped")
def _(matrix: Matrix) -> None:
    def flip(path: Path, offset: int) -> None:
        with path.open("rb") as file:
            file.seek(offset)
            (byte,) = file.read(1)
        patch(path, offset, bytes([byte ^ 1 << offset // SECTOR % 8]))

    damaged_lives(matrix, flip, 60)


@case("a segment is gone, empty, doubled, or another one's")
def _(matrix: Matrix) -> None:
    def gone(path: Path) -> None:
        path.unlink()

    def empty(path: Path) -> None:
        path.write_bytes(b"")

    def doubled(path: Path) -> None:
        shutil.copy(path, path.with_name("00000077.seg"))

    def others(path: Path) -> None:
        shutil.copy(segments(path.parent.parent)[0], path)

    def longer(path: Path) -> None:
        path.write_bytes(2 * path.read_bytes())

    def a_folder(path: Path) -> None:
        path.unlink()
        path.mkdir()

    for sealed in matrix.few((False, True), 1):
        for change in matrix.few((gone, empty, doubled, others, longer, a_folder), 1):
            with matrix.folder(sealed=sealed) as folder:
                change(segments(folder)[-1])
                matrix.serves(Life(folder))
                matrix.serves(Life(folder))


def patch(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        content = content[: path.stat().st_size - offset]
        file.seek(offset)
        file.write(content)


@case("the secret, the lock or a description is damaged")
def _(matrix: Matrix) -> None:
    contents = (b"", b"\xff\x00garbage", b"[" * 100_000, b"{}", bytes(1 << 16), None)
    for name in ("secret", "lock", "*.json"):
        for content in matrix.few(contents, 1):
            with matrix.folder(sealed=True) as folder:
                paths = list(folder.glob(name))
                for path in paths:
                    path.unlink()
                    if content is not None:
                        path.write_bytes(content)
                result = matrix.serves(Life(folder))
                assert bool(result["loaded"]) == (name != "secret"), name
                assert matrix.serves(Life(folder))["loaded"], "what was stored anew is found"
    for bit in matrix.few(range(128), 1):
        with matrix.folder(sealed=True) as folder:
            secret = bytearray((folder / "secret").read_bytes())
            secret[bit // 8] ^= 1 << bit % 8
            (folder / "secret").write_bytes(secret)
            assert matrix.serves(Life(folder))["loaded"] == 0, "found under another secret"


# ---- the disk fails ------------------------------------------------------------------------------

ERRORS = (trial_files.FULL, trial_files.BROKEN, trial_files.READ_ONLY, trial_files.REFUSED)


@case("a call fails: ENOSPC, EIO, EROFS, EACCES")
def _(matrix: Matrix) -> None:
    names = [
        *("preadv", "pwritev", "create", "open_to_read", "open_to_write", "truncate", "sync_data"),
        *("sync_folder", "make_folder", "remove_folder", "rename", "unlink", "names", "status"),
        *("size", "close"),
    ]
    ways = [
        (name, number, after, count)
        for name in names
        for number in ERRORS
        for after in (0, 1, 4, 20)
        for count in (1, 1 << 30)
    ]
    for name, number, after, count in matrix.few(ways, 3, 300):
        for sealed in (False, True)[: 1 if matrix.is_short else 2]:
            with matrix.folder(sealed=sealed) as folder:
                trial = Trial(errors={name: number}, after=after, num_errors=count)
                result = matrix.ends(Life(folder, trial, seed=1, num_rounds=2))
                matrix.note("refused by name", "refused" in result)
                after_it = matrix.serves(Life(folder))
                assert after_it["disk"]["damaged"] == 0, (name, number, after, count)


@case("reads and writes fall short")
def _(matrix: Matrix) -> None:
    for most_bytes in matrix.few((4096, 7, 512, 5000), 1):  # loads may be late by then
        with matrix.folder() as folder:
            matrix.serves(Life(folder, Trial(most_bytes=most_bytes)))
            assert matrix.serves(Life(folder))["loaded"]


@case("reads take 10 s")
def _(matrix: Matrix) -> None:
    for slow_reads in matrix.few((1, 2, 3), 0):
        with matrix.folder(sealed=True) as folder:
            slow_s = 10.0
            trial = Trial(slow_reads=slow_reads, slow_s=slow_s)
            result = matrix.serves(Life(folder, trial))
            assert result["answered_s"] < 0.8 * slow_s, "requests waited for the disk"
            matrix.note("loads given up", result["late"])
            assert matrix.serves(Life(folder))["loaded"]


# ---- another engine ------------------------------------------------------------------------------

DIFFERENT: Sequence[dict[str, Any]] = (
    {"kv_cache_dtype": "int8"},
    {"quantization": "int8"},
    {"dtype": "bfloat16"},
    {"block_size": 32},
    {"kernels": "avx2"},
    {"kernels": "portable"},
    {"kernels": "torch"},
)


@case("another format, quantization, block size, instruction set")
def _(matrix: Matrix) -> None:
    for options in matrix.few(DIFFERENT, 2):
        with matrix.folder(sealed=True) as folder:
            usual = matrix.serves(Life(folder))["kernels"]
            if options.get("kernels") == usual:
                matrix.note(f"as usual: {usual}")
                continue
            result = matrix.ends(Life(folder, options=options))
            if "refused" in result:
                matrix.note(f"not on this processor: {options}")
                continue
            assert result["loaded"] == 0, f"found under {options}"
            matrix.serves(Life(folder))


@case("another number of ranks")
def _(matrix: Matrix) -> None:
    with matrix.folder(sealed=True) as folder:
        two = {"tensor_parallel_size": 2}
        assert matrix.ends(Life(folder, options=two))["loaded"] == 0, "found by other ranks"
        if not matrix.is_short:
            assert matrix.ends(Life(folder, options=two))["loaded"] > 0
        assert matrix.serves(Life(folder))["loaded"]


@case("other weights under the same name")
def _(matrix: Matrix) -> None:
    from safetensors.torch import load_file, save_file

    from quire.hub.model_folder import EMBEDDED_MODEL

    with matrix.folder(is_empty=True) as folder:
        model = Path(shutil.copytree(EMBEDDED_MODEL, folder / "model"))
        cache, weights = folder / "cache", model / "model.safetensors"
        before = weights.read_bytes()
        options = {"model": str(model)}
        matrix.serves(Life(cache, options=options))
        tensors = load_file(weights)
        name = sorted(tensors)[len(tensors) // 2]
        tensors[name].view(-1)[5] += 0.5
        weights.chmod(0o644)
        save_file(tensors, weights, {"format": "pt"})
        other = {"model": f"{folder}/./model"}
        assert matrix.serves(Life(cache, options=other))["loaded"] == 0, "found with other weights"
        assert matrix.serves(Life(cache, options=other))["loaded"]
        weights.write_bytes(before)
        matrix.serves(Life(cache, options=options))
