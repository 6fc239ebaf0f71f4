"""Names of adapters: what --lora-modules says, and what is loaded and unloaded since."""

import asyncio
import json
import os

import pytest

from quire.core.adapters import AdapterRef
from quire.errors import AdapterError, ConfigurationError, InvalidRequestError
from quire.hub.adapter_files import CONFIG_FILE
from quire.server.adapter_names import AdapterNames, UnknownAdapterError, read_modules


class Engine:
    """Finds what is in `contents`, after the gate is open."""

    def __init__(self) -> None:
        self.contents: dict[str, str] = {}
        self.asked: list[tuple[str, bool]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def find_adapter(self, name: str, path: str, *, anew: bool = False) -> AdapterRef:
        self.asked.append((name, anew))
        await self.gate.wait()
        if path not in self.contents:
            raise AdapterError(f"adapter {name!r}: it is not there")
        return AdapterRef(name, path, self.contents[path])


def folders(root, *names):
    for name in names:
        (root / name).mkdir()
        (root / name / CONFIG_FILE).write_text("{}")
    return root


def test_modules_are_names_and_folders(tmp_path):
    folders(tmp_path, "b", "a")
    found = read_modules(
        [
            "sql=/x/sql",
            json.dumps({"name": "json", "path": "/x/json", "base_model_name": "m"}),
            str(tmp_path),
        ],
        ["m"],
    )
    assert found.paths == {
        "sql": "/x/sql",
        "json": "/x/json",
        "a": str(tmp_path / "a"),
        "b": str(tmp_path / "b"),
    }
    assert found.read_first == ("sql", "json")
    assert read_modules([], []).paths == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["a=/x", "a=/y"], "the name 'a' is given twice"),
        (["m=/x"], "the name 'm' is given twice, or is the model's own"),
        (["/nowhere"], "must be name=folder, or a folder of adapters: No such file"),
        (['{"name": "a"}'], "an object must have name and path"),
        (['{"name": "a", "path": "/x", "rank": 3}'], "an object must have name and path"),
        (["{"], "an object must have name and path"),
        (["=/x"], "must be name=folder"),
        (['{"name": "", "path": "/x"}'], "lora_name is '', but must have 1 to 256 characters"),
        (["a" * 257 + "=/x"], "must have 1 to 256 characters"),
        (["dummy=/x"], "lora_name is 'dummy', which stands for the model itself"),
    ],
)
def test_invalid_lora_modules_are_refused(given, message):
    with pytest.raises(ConfigurationError, match=message):
        read_modules(given, ["m"])


def test_an_adapter_itself_and_an_empty_folder_are_refused(tmp_path):
    folders(tmp_path, "a")
    with pytest.raises(ConfigurationError, match="is an adapter itself; give it a name: a="):
        read_modules([str(tmp_path / "a")], [])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match="a folder without adapters"):
        read_modules([str(tmp_path / "empty")], [])


def test_a_folder_whose_name_is_no_text_is_refused(tmp_path):
    folders(tmp_path, "a", os.fsdecode(b"b\xff"))
    with pytest.raises(ConfigurationError, match=r"lora_name has U\+DCFF"):
        read_modules([str(tmp_path)], [])


def test_a_reference_to_a_name_keeps_its_content():
    async def run():
        engine = Engine()
        engine.contents |= {"/a": "1", "/b": "2"}
        names = AdapterNames(engine, {"x": "/a"})
        first = names.get("x")
        names.unload("x")
        assert (await names.ref_of(first)).digest == "1", "never the model's own"
        await names.load("x", "/b")
        assert (await names.ref_of(first)).digest == "1"
        assert (await names.ref_of(names.get("x"))).digest == "2"

    asyncio.run(run())


def test_a_name_is_read_once_by_all_who_ask():
    async def run():
        engine = Engine()
        engine.contents["/a"] = "1"
        engine.gate.clear()
        names = AdapterNames(engine, {"a": "/a"})
        asking = [asyncio.ensure_future(names.ref_of(names.get("a"))) for _ in range(3)]
        await asyncio.sleep(0)
        asking[0].cancel()
        engine.gate.set()
        assert {await each for each in asking[1:]} == {AdapterRef("a", "/a", "1")}
        assert (
            await names.ref_of(names.get("model")) is None
            and await names.ref_of(names.get(None)) is None
        )
        assert engine.asked == [("a", False)]

    asyncio.run(run())


def test_an_adapter_that_failed_is_read_again_the_next_time():
    async def run():
        engine = Engine()
        names = AdapterNames(engine, {"a": "/a"})
        for _ in range(2):
            with pytest.raises(AdapterError):
                await names.ref_of(names.get("a"))
        engine.contents["/a"] = "1"
        assert (await names.ref_of(names.get("a"))).digest == "1"
        with pytest.raises(ConfigurationError, match="lora_modules: adapter 'b': it is not there"):
            await AdapterNames(engine, {"b": "/b"}).read_all(["b"])

    asyncio.run(run())


def test_names_come_and_go():
    async def run():
        engine = Engine()
        engine.contents |= {"/a": "1", "/b": "2"}
        names = AdapterNames(engine, model_names=["m"])
        await names.load("x", "/a")
        assert "x" in names and (await names.ref_of(names.get("x"))).digest == "1"
        with pytest.raises(InvalidRequestError, match="'x', which is loaded already"):
            await names.load("x", "/b")
        with pytest.raises(AdapterError):
            await names.load("x", "/gone", in_place=True)
        assert (await names.ref_of(names.get("x"))).digest == "1", "what failed has changed nothing"
        await names.load("x", "/b", in_place=True)
        assert (await names.ref_of(names.get("x"))).digest == "2"
        refused = {
            "m": "the model's own",
            "": "1 to 256",
            "a" * 257: "1 to 256",
            "\udcff": "surrogate",
            "dummy": "which stands for the model itself",
        }
        for name, message in refused.items():
            with pytest.raises(InvalidRequestError, match=message):
                await names.load(name, "/a")
        with pytest.raises(InvalidRequestError, match="lora_path is ''"):
            await names.load("y", "")
        names.unload("x")
        assert await names.ref_of(names.get("x")) is None and names.listed() == []
        with pytest.raises(UnknownAdapterError, match="'x' is not loaded here"):
            names.unload("x")
        assert [anew for _, anew in engine.asked] == [True] * 3

    asyncio.run(run())


def test_a_server_without_adapters_says_so():
    names = AdapterNames()
    with pytest.raises(InvalidRequestError, match="start it with --enable-lora"):
        asyncio.run(names.load("a", "/a"))
    with pytest.raises(InvalidRequestError, match="start it with --enable-lora"):
        names.unload("a")
