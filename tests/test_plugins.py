"""Plugins: loaded once in each process, refused in one sentence, and served as a package."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.registering import restored
from tests.server.launching import RunningServer

from quire.cli.main import main
from quire.core.scheduling.policy import POLICIES, FcfsPolicy
from quire.errors import ConfigurationError
from quire.options.engine_options import EngineOptions
from quire.plugins import _loaded, load_plugins
from quire.simulation.__main__ import main as simulate

ROOT = Path(__file__).parent.parent
POLICY = """
from quire.core.scheduling.policy import POLICIES, FcfsPolicy

class Mine(FcfsPolicy):
    pass
"""
REGISTER = POLICY + 'POLICIES.register("mine", Mine)\n'
WITNESS = """
import os, sys
with open(os.environ["WITNESS"], "a") as file:
    print(sys.argv[0], file=file)
"""


class Folder:
    """A folder in sys.path, in which a test writes plugins."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def plugin(self, name: str, source: str) -> str:
        (self.path / f"{name}.py").write_text(source)
        return name


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    """What its plugins register is gone after the test, and so are their modules."""
    monkeypatch.syspath_prepend(tmp_path)
    before, modules = set(_loaded), set(sys.modules)
    with restored(POLICIES):
        yield Folder(tmp_path)
    _loaded.clear()
    _loaded.update(before)
    for name in set(sys.modules) - modules:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def test_checking_the_options_loads_their_plugins(folder: Folder) -> None:
    given = {"scheduling_policy": "mine"}
    with pytest.raises(ConfigurationError, match=r"one of fcfs, priority, .*, deadline$"):
        EngineOptions.from_mapping(given)
    options = EngineOptions.from_mapping({**given, "plugins": [folder.plugin("one", REGISTER)]})
    assert options.plugins == ("one",)
    assert EngineOptions.from_mapping(options.as_mapping()) == options
    assert issubclass(POLICIES.get("mine"), FcfsPolicy)
    with pytest.raises(ConfigurationError, match=r"one of fcfs, .*, mine$"):
        EngineOptions(scheduling_policy="yours")


def test_a_plugin_is_loaded_once_and_a_function_called_once(folder: Folder) -> None:
    counting = "calls = []\ndef begin():\n    calls.append(1)\n"
    name = folder.plugin("counting", counting)
    for _ in range(2):
        load_plugins([f"{name}:begin", name])
    assert sys.modules[name].calls == [1]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def", r"SyntaxError: invalid syntax \(bad.py, line 1\)"),
        ("requires_quire = '>=9'", r"it needs quire >=9, but this is \d+\.\d+\.\d+"),
        ("requires_quire = 'new'", "InvalidSpecifier: .*'new'"),
        (
            POLICY + 'POLICIES.register("fcfs", Mine)',
            "scheduling policy 'fcfs' is registered by quire and by bad; give one of them another"
            " name",
        ),
    ],
)
def test_a_bad_plugin_ends_the_start_in_one_sentence(folder: Folder, source: str, why: str) -> None:
    folder.plugin("bad", source)
    with pytest.raises(ConfigurationError, match=f"^plugin 'bad' can't be loaded: {why}$"):
        load_plugins(["bad"])
    folder.plugin("bad", "mended = True")
    sys.modules.pop("bad", None)
    load_plugins(["bad"])


def test_a_clash_names_both_plugins(folder: Folder) -> None:
    load_plugins([folder.plugin("one", REGISTER)])
    with pytest.raises(ConfigurationError, match="'mine' is registered by one and by two; give"):
        load_plugins([folder.plugin("two", REGISTER)])


def test_a_plugin_that_there_is_not_is_refused() -> None:
    for name in ("nowhere_at_all", "os:no_such_function", "", "two words"):
        with pytest.raises(ConfigurationError, match=f"^plugin {name!r} can't be loaded: "):
            load_plugins([name])
    with pytest.raises(ConfigurationError, match="plugins must be a list of texts"):
        EngineOptions.from_mapping({"plugins": 5})


def test_a_plugin_may_check_options_itself(folder: Folder) -> None:
    source = (
        "from quire.options.engine_options import EngineOptions\n"
        "def begin():\n    EngineOptions(plugins=(__name__ + ':begin',))\n"
    )
    load_plugins([folder.plugin("inner", source) + ":begin"])


# ---- commands -----------------------------------------------------------------------------------


def test_commands_know_the_names(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.plugin("one", REGISTER)
    with pytest.raises(SystemExit):
        main(["serve", "--plugin", "one", "--help"])
    assert "shortest_first, deadline or mine" in " ".join(capsys.readouterr().out.split())
    assert main(["generate", "x", "--plugin=two", "--scheduling-policy", "mine"]) == 1
    error = capsys.readouterr().err
    assert error == (
        "quire: error: plugin 'two' can't be loaded: ModuleNotFoundError: No module named 'two';"
        " install it, or put its folder into PYTHONPATH\n"
    )


def test_a_config_file_may_name_plugins_after_their_names(
    folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.plugin("one", REGISTER)
    file = tmp_path / "serve.yaml"
    file.write_text("scheduling-policy: mine\nplugin: [one]\nport: 99999\n")
    with pytest.raises(SystemExit):
        main(["serve", "--config", str(file)])
    assert "line 3: port is 99999" in capsys.readouterr().err
    file.write_text("port: 0\nplugin: two\n")
    with pytest.raises(SystemExit):
        main(["serve", "--config", str(file)])
    assert "line 2: plugin 'two' can't be loaded" in capsys.readouterr().err


def test_the_simulator_runs_a_plugins_policy(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.plugin("one", REGISTER)
    words = ["--policy", "mine", "--num-requests", "5"]
    assert simulate([*words, "--plugin", "one"]) == 0
    assert simulate([*words, "--plugin", "two"]) == 2
    assert "plugin 'two' can't be loaded" in capsys.readouterr().err


def test_no_plugin_is_looked_for_where_no_command_is_named() -> None:
    code = (
        "import sys; from quire.cli.main import main; main(['--version']);"
        "sys.exit('importlib.metadata' in sys.modules)"
    )
    subprocess.run([sys.executable, "-S", "-c", code], check=True, env=with_path(*sys.path))


# ---- the sample package -------------------------------------------------------------------------


def with_path(*folders: str | Path, **variables: str) -> dict[str, str]:
    paths = [str(each) for each in folders if each]
    return os.environ | variables | {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which pip has installed examples/plugin."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    words = ["--no-build-isolation", "--target", str(target), str(ROOT / "examples/plugin")]
    subprocess.run([*pip, *words], check=True)
    return target


@pytest.fixture
def launched(installed: Path, tmp_path: Path) -> Iterator[Any]:
    """Starts `quire serve` where the package is installed."""
    (tmp_path / "witness.py").write_text(WITNESS)
    started: list[RunningServer] = []

    def launch(*words: str) -> RunningServer:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "quire", "serve", "--port", "0", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=with_path(tmp_path, installed, WITNESS=str(tmp_path / "loaded")),
        )
        started.append(RunningServer(process))
        return started[-1]

    yield launch
    for server in started:
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGTERM)
            server.wait_for_exit()
        server.close()


@pytest.mark.timeout(300)
def test_the_sample_is_served_by_replicas_of_two_ranks(launched: Any, tmp_path: Path) -> None:
    server = launched(
        *("--plugin", "witness", "--replicas", "2", "--tensor-parallel-size", "2"),
        *("--scheduling-policy", "shortest_prompt", "--eviction", "freed_first"),
        *("--routing-policy", "fewest_requests", "--num-blocks", "64", "--num-threads", "1"),
        *("--max-itl-ratio", "0"),
    )
    server.wait_until_ready()
    body = {"model": "embedded", "prompt": "import os", "max_tokens": 3}
    answers = [server.http.post("/v1/completions", json=body) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    uptime = server.http.get("/v1/uptime").json()
    assert uptime["model"] == "embedded" and uptime["created_s"] > 0
    assert "/v1/uptime" in server.http.get("/openapi.json").json()["paths"]
    loaded = [Path(line).stem for line in (tmp_path / "loaded").read_text().split()]
    assert sorted(loaded) == ["__main__", *["engine_main"] * 2, *["worker_main"] * 2]


def test_names_of_the_sample_are_refused_with_all_names(launched: Any) -> None:
    server = launched("--scheduling-policy", "shortest_promt")
    assert server.process.wait(60) == 1
    assert server.output() == (
        "quire: error: --scheduling-policy is 'shortest_promt', but must be one of fcfs, priority,"
        " fair, longest_prefix, shortest_first, deadline, shortest_prompt\n"
    )


def test_installed_packages_of_one_name_clash(installed: Path, tmp_path: Path) -> None:
    """Another package registers a policy of the sample's name; its author is not the sample's."""
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[quire.plugins]\nother = other\n")
    (tmp_path / "other.py").write_text(REGISTER.replace('"mine"', '"shortest_prompt"'))
    run = subprocess.run(
        [sys.executable, "-P", "-m", "quire", "doctor"],
        capture_output=True,
        text=True,
        env=with_path(installed, tmp_path),
    )
    assert run.returncode == 1
    assert run.stderr == (
        "quire: error: plugin 'other' of the package other can't be loaded: scheduling policy"
        " 'shortest_prompt' is registered by quire_sample and by other; give one of them another"
        " name\n"
    )
