"""Where a model's name leads. The hub itself is never called."""

import errno
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from quire.errors import CheckpointError, ConfigurationError
from quire.hub.model_folder import EMBEDDED_MODEL, resolve_model_folder


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The calls that reached the hub's client, which answers with a folder."""
    calls = []

    def snapshot_download(name, **options):
        calls.append((name, options))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_no_name_is_the_embedded_model(hub):
    folder = resolve_model_folder(None)
    assert folder == EMBEDDED_MODEL
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in folder.iterdir()
    }
    assert not hub


def test_a_folder_is_itself(hub, tmp_path, monkeypatch):
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model_folder(str(tmp_path / "org")) == tmp_path / "org"
    assert resolve_model_folder("org/model") == Path("org/model")
    assert resolve_model_folder("~/org/model") == tmp_path / "org" / "model"
    assert not hub


def test_a_hub_id_is_fetched_without_pickles(hub, tmp_path):
    assert resolve_model_folder("org/model", revision="v2") == tmp_path / "snapshot"
    [(name, options)] = hub
    assert (name, options["revision"]) == ("org/model", "v2")
    assert options["allow_patterns"] == ["*.safetensors", "*.json", "*.jinja"]


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("model-00001-of-00002.safetensors", True),
        ("model.safetensors.index.json", True),
        ("tokenizer.json", True),
        ("chat_template.jinja", True),
        ("pytorch_model.bin", False),
        ("model.pt", False),
        ("consolidated.safetensors", False),
        ("original/params.json", False),
        ("modeling_custom.py", False),
    ],
)
def test_the_patterns_choose_the_files_that_are_read(file, wanted, hub):
    resolve_model_folder("org/model")
    options = hub[0][1]
    chosen = huggingface_hub.utils.filter_repo_objects(
        [file], allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"]
    )
    assert list(chosen) == ([file] if wanted else [])


def _refusal(monkeypatch, error, name="org/model", revision=None):
    """What is said where the hub's client raises `error`."""

    def fail(name, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError) as caught:
        resolve_model_folder(name, revision=revision)
    message = str(caught.value)
    assert message.isprintable() and "is not a folder here" in message
    return message


def test_what_the_hub_can_not_give_says_both_ways(monkeypatch):
    message = _refusal(monkeypatch, ConnectionError("refused\nby it"), revision="v2")
    assert "'org/model', revision 'v2', is not a folder here" in message
    assert "refused by it" in message
    assert "name a folder" in message and "a hub id such as" in message


_ANSWER = httpx.Response(401, request=httpx.Request("GET", "https://huggingface.co/org/model"))


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (
            GatedRepoError("gated", response=_ANSWER),
            ["accepted its terms", "co/org/model", "HF_TOKEN=..."],
        ),
        (
            RepositoryNotFoundError("no", response=_ANSWER),
            ["no such model", "check the id", "HF_TOKEN=..."],
        ),
        (
            RevisionNotFoundError("no", response=_ANSWER),
            ["no such revision", "co/org/model/tree/main"],
        ),
        (LocalEntryNotFoundError("no"), ["can't be reached", "hf download org/model --local-dir"]),
        (OfflineModeIsEnabled("no"), ["can't be reached", "HF_HUB_OFFLINE"]),
        (OSError(errno.ENOSPC, "No space left on device"), ["the disk is full", "HF_HOME"]),
        (PermissionError(errno.EACCES, "no", "/cache"), ["can't be written", "/cache", "HF_HOME"]),
    ],
)
def test_each_of_the_hubs_errors_says_what_to_do(error, parts, monkeypatch):
    message = _refusal(monkeypatch, error)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("name", ["two words", "", "a--b"])
def test_a_name_that_is_no_hub_id_says_both_ways(name):
    # The hub's client refuses these itself, before any call.
    with pytest.raises(
        CheckpointError, match="is not a folder here, and can't be a hub id"
    ) as caught:
        resolve_model_folder(name)
    assert "a hub id such as" in str(caught.value)


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "~/nowhere", "a/b/c", "..\\a"])
def test_a_path_that_leads_nowhere_is_no_matter_of_the_hub(name, hub):
    with pytest.raises(CheckpointError, match="is not a folder here") as caught:
        resolve_model_folder(name)
    assert "a hub id such as" in str(caught.value)
    assert ("nor is there a folder /no/such" in str(caught.value)) is (name == "/no/such/folder")
    assert not hub


def test_a_gguf_file_is_called_so(hub, tmp_path):
    for path in (tmp_path / "tiny.gguf", tmp_path / "renamed.bin"):
        path.write_bytes(b"GGUF\x03\0\0\0")
        with pytest.raises(CheckpointError, match="is a file in GGUF format") as caught:
            resolve_model_folder(str(path))
        assert "original model's folder or hub id" in str(caught.value)
        assert "--quantization int4" in str(caught.value)
    with pytest.raises(CheckpointError, match="in GGUF format"):
        resolve_model_folder("org/model-q4.gguf")
    assert not hub


def test_a_file_of_a_model_is_answered_with_its_folder(hub, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"but a model is a folder .* the folder: {tmp_path}"):
        resolve_model_folder(str(path))
    assert not hub


@pytest.mark.parametrize("local", [True, False])
def test_a_revision_of_a_folder_is_refused(local, tmp_path):
    name = str(tmp_path) if local else None
    with pytest.raises(ConfigurationError, match=r"revision is 'main', but .* is a local folder"):
        resolve_model_folder(name, revision="main")
