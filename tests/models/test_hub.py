"""Where a model's name leads. The hub itself is never called."""

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from quire.errors import CheckpointError, ConfigurationError
from quire.models.hub import EMBEDDED_MODEL, resolve_model_folder


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


@pytest.mark.parametrize(
    "error",
    [LocalEntryNotFoundError("no network and not cached"), ConnectionError("refused")],
)
def test_what_the_hub_can_not_give_says_both_ways(error, monkeypatch):
    def fail(name, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError) as caught:
        resolve_model_folder("org/model", revision="v2")
    message = str(caught.value)
    assert "'org/model', revision 'v2', is not a folder here" in message
    assert str(error) in message
    assert "name a folder" in message and "a hub id such as" in message


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "a/b/c", "two words", ""])
def test_a_name_that_is_no_hub_id_says_both_ways(name):
    # The hub's client refuses these itself, before any call.
    with pytest.raises(CheckpointError, match="is not a folder here") as caught:
        resolve_model_folder(name)
    assert "a hub id such as" in str(caught.value)


@pytest.mark.parametrize("local", [True, False])
def test_a_revision_of_a_folder_is_refused(local, tmp_path):
    name = str(tmp_path) if local else None
    with pytest.raises(ConfigurationError, match=r"revision is 'main', but .* is a local folder"):
        resolve_model_folder(name, revision="main")
