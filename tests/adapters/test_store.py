"""The host's memory of adapters: found by folders, asked for by digests, read again from disk."""

import gc
import os
import threading
import weakref
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch

from quire.adapters.adapter import LoRAAdapter, LoRAWeights
from quire.adapters.peft_folder import read_adapter
from quire.adapters.store import AdapterStore
from quire.core.adapters import AdapterRef
from quire.errors import AdapterError


class Folders:
    """Folders with a number in them; the adapter of one is made of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.reads: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def save(self, name: str, number: float) -> str:
        folder = self.root / name
        folder.mkdir(exist_ok=True)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / file).write_text(str(number))
        return str(folder)

    def read(self, folder: Path) -> LoRAAdapter:
        self.gate.wait(60)
        self.reads.append(folder.name)
        file = folder / "adapter_config.json"
        if not file.exists():
            raise AdapterError(f"adapter {folder}: {file} is not there")
        number = float(file.read_text())
        if number == 13:
            raise RuntimeError(f"a bug in {folder}")
        pair = torch.full((1, 2), number), torch.full((3, 1), number)
        return LoRAAdapter(str(folder), {"q_proj": LoRAWeights(*pair, 1.0)})


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path)


def make(folders: Folders, max_cpu_loras: int = 2) -> AdapterStore:
    return AdapterStore(folders.read, max_cpu_loras)


def find(store: AdapterStore, name: str, path: str, *, anew: bool = False) -> AdapterRef:
    return store.find(name, path, anew=anew).result(5)


def make_ready(store: AdapterStore, digest: str) -> bool:
    """Ask until it is ready, or has failed."""
    while not store.begin(digest):
        store.wait()
        with store._lock:
            if digest in store._failed:
                return False
    return True


def test_an_adapter_is_read_again_only_after_its_files_changed(folders: Folders) -> None:
    store, path = make(folders), folders.save("a", 1)
    first = find(store, "one", path)
    assert find(store, "two", path) == AdapterRef("two", path, first.digest)
    assert folders.reads == ["a"]
    folders.save("a", 2)
    os.utime(Path(path) / "adapter_config.json", ns=(1, 1))
    assert find(store, "one", path).digest != first.digest
    assert folders.reads == ["a", "a"]


def test_it_is_read_anew_where_that_is_asked_for(folders: Folders) -> None:
    store, path = make(folders), folders.save("a", 1)
    assert find(store, "a", path) == find(store, "a", path, anew=True)
    assert folders.reads == ["a", "a"]


def test_two_folders_with_equal_content_are_one_adapter(folders: Folders) -> None:
    store = make(folders)
    first, second = (find(store, name, folders.save(name, 5)) for name in ("a", "b"))
    assert first.digest == second.digest and store.counts()["num_host"] == 1


def test_a_relative_path_is_that_of_this_process(folders: Folders, monkeypatch) -> None:
    path = folders.save("a", 1)
    monkeypatch.chdir(folders.root)
    assert find(make(folders), "a", "a").path == path


def test_the_host_keeps_those_used_last_and_others_are_read_again(folders: Folders) -> None:
    store = make(folders, 2)
    digests = [
        find(store, name, folders.save(name, index)).digest for index, name in enumerate("abc")
    ]
    assert store.counts() | {"host_bytes": 0} == {
        "num_host": 2, "host_bytes": 0, "num_reads": 3, "num_failed": 0,
    }  # fmt: skip
    assert store.begin(digests[2]) and store.pop_ready(digests[2]).digest == digests[2]
    assert not store.begin(digests[0]), "it was the first, and is no longer in memory"
    assert make_ready(store, digests[0]) and folders.reads == ["a", "b", "c", "a"]
    assert store.pop_ready(digests[0]).digest == digests[0]


def test_a_ready_adapter_stays_when_the_host_evicts_others(folders: Folders) -> None:
    store = make(folders, 1)
    first = find(store, "a", folders.save("a", 1)).digest
    assert store.begin(first)
    find(store, "b", folders.save("b", 2))
    assert store.begin(first) and store.counts()["num_host"] == 2
    store.release(first)
    assert store.counts()["num_host"] == 1


def test_an_adapter_released_during_its_reading_is_not_made_ready(folders: Folders) -> None:
    store = make(folders, 1)
    first = find(store, "a", folders.save("a", 1)).digest
    find(store, "b", folders.save("b", 2))
    folders.gate.clear()
    assert not store.begin(first)
    reading = list(store._reading.values())
    store.release(first)
    folders.gate.set()
    wait(reading, 60)
    assert not store._ready and store.begin(first), "but it is in the host's memory"


def test_a_deleted_adapter_fails_with_an_error_that_names_it(folders: Folders) -> None:
    store = make(folders, 1)
    path = folders.save("a", 1)
    digest = find(store, "sql", path).digest
    find(store, "b", folders.save("b", 2))
    (Path(path) / "adapter_config.json").unlink()
    assert not make_ready(store, digest)
    assert store.pop_failed() == {digest: "adapter 'sql': adapter_config.json is not there"}
    assert store.pop_failed() == {} and store.counts()["num_failed"] == 1
    folders.save("a", 1)
    assert make_ready(store, digest), "it may be tried again"


def test_an_adapter_changed_during_its_reading_is_not_served(folders: Folders) -> None:
    path = folders.save("a", 1)

    def read(folder: Path) -> LoRAAdapter:
        adapter = folders.read(folder)
        if len(folders.reads) == 1:
            os.utime(folder / "adapter_model.safetensors", ns=(5, 5))
        return adapter

    store = AdapterStore(read, 2)
    with pytest.raises(AdapterError, match="adapter 'a': its files were changed while"):
        find(store, "a", path)
    assert store.counts()["num_host"] == 0
    assert find(store, "a", path).digest and len(folders.reads) == 2


def test_any_folder_with_equal_content_can_be_read(folders: Folders) -> None:
    store = make(folders, 1)
    refs = [find(store, name, folders.save(name, 1)) for name in ("mine", "theirs")]
    find(store, "b", folders.save("b", 2))
    store.remember_source(refs[0])
    store.remember_source(refs[1])
    folders.save("theirs", 3)
    assert make_ready(store, refs[0].digest), "what became of theirs is nothing to mine"
    store.pop_ready(refs[0].digest)
    find(store, "b", str(folders.root / "b"), anew=True)
    (folders.root / "mine" / "adapter_config.json").unlink()
    assert not make_ready(store, refs[0].digest)
    assert store.pop_failed().keys() == {refs[0].digest} and store.counts()["num_failed"] == 1


def test_adapter_whose_files_changed_is_not_loaded(folders: Folders) -> None:
    store = make(folders, 1)
    digest = find(store, "a", folders.save("a", 1)).digest
    find(store, "b", folders.save("b", 2))
    folders.save("a", 3)
    assert not make_ready(store, digest)
    assert "its files were changed since it was loaded" in store.pop_failed()[digest]


def test_an_adapter_found_by_another_process_is_read_from_its_path(folders: Folders) -> None:
    path = folders.save("a", 1)
    ref = find(make(folders), "a", path)
    store = make(folders)
    store.remember_source(ref)
    assert make_ready(store, ref.digest)


def test_errors_do_not_tell_the_path(folders: Folders, caplog) -> None:
    store = make(folders)
    with pytest.raises(AdapterError, match="'x': it can't be read: RuntimeError: a bug in"):
        find(store, "x", folders.save("a", 13))
    with pytest.raises(AdapterError) as raised:
        find(store, "x", str(folders.root / "gone"))
    assert str(folders.root) not in str(raised.value)
    assert str(folders.root) in caplog.text


@pytest.mark.parametrize(
    "path", ["a\0b", "/\ud800", "/" + "a" * 5000], ids=["nul", "surrogate", "long"]
)
def test_impossible_paths_are_refused(tmp_path: Path, path: str) -> None:
    store = AdapterStore(lambda folder: read_adapter(folder, max_rank=8), 2)
    with pytest.raises(AdapterError, match="adapter 'x': it "):
        find(store, "x", path)


def test_a_failure_holds_no_tensors(folders: Folders) -> None:
    """Not even until the garbage collector comes."""
    read: list[weakref.ref[torch.Tensor]] = []

    def read_in_vain(folder: Path) -> LoRAAdapter:
        adapter = Folders.read(folders, folder)
        read.append(weakref.ref(adapter.weights["q_proj"].a))
        if folder.name == "broken":
            raise AdapterError("it holds NaN")
        if folder.name == "changed":
            folders.save("changed", len(read))
        return adapter

    store = AdapterStore(read_in_vain, 2)
    gc.disable()
    try:
        for name in ("broken", "changed"):
            future = store.find(name, folders.save(name, 1.0))
            with pytest.raises(AdapterError, match=r"NaN|were changed"):
                future.result(5)
            ended = store.find("another", folders.save("another", 2.0))  # the thread goes on
            ended.result(5)
            assert read[0 if name == "broken" else 2]() is None
    finally:
        gc.enable()
