"""Where a model's name leads. In place of the hub answers a server on a loopback port."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import httpx
import huggingface_hub.constants
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tests.hub.conftest import SHARDS, model_files
from tests.hub.hub_server import COMMIT, FakeHub

from quire.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from quire.hub import fetching, repository
from quire.hub.found_model import FoundModel
from quire.hub.model_folder import (
    EMBEDDED_MODEL,
    find_model,
    resolve_model_folder,
    resolve_text_folder,
)


def test_no_name_is_the_embedded_model(hub):
    folder = resolve_model_folder(None)
    assert folder == EMBEDDED_MODEL
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in folder.iterdir()
    }
    assert not hub.requests


def test_path_of_a_folder_is_used_as_the_model(hub, tmp_path, monkeypatch):
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model_folder(str(tmp_path / "org")) == tmp_path / "org"
    assert resolve_model_folder("org/model") == Path("org/model")
    assert resolve_model_folder("~/org/model") == tmp_path / "org" / "model"
    assert not hub.requests


TEXT = {
    *("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *("chat_template.json", "additional_chat_templates/tool_use.jinja"),
    *("1_Pooling/config.json", "model.safetensors.index.json"),
}


def _names(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_a_hub_id_is_fetched_without_what_is_not_needed(revision, hub, cache):
    folder = resolve_model_folder("org/model", revision, needs_tokenizer=True)
    assert folder == cache / "models--org--model" / "snapshots" / COMMIT
    assert _names(folder) == TEXT | {*SHARDS}
    for name in _names(folder):
        assert (folder / name).read_bytes() == hub.files[name]
    assert {*hub.fetched()} == TEXT | {*SHARDS}
    hub.requests.clear()
    assert resolve_model_folder("org/model", revision) == folder
    assert not hub.fetched()


def test_the_small_files_come_first_and_are_checked(hub):
    seen = []

    def check(folder):
        seen.append(_names(folder))
        raise UnsupportedModelError("not this one")

    with pytest.raises(UnsupportedModelError, match="not this one"):
        resolve_model_folder("org/model", check=check)
    assert seen == [TEXT]
    assert {*hub.fetched()} == TEXT


def test_a_model_is_found_without_its_weights(hub):
    found = find_model("org/model")
    assert _names(found.folder) == TEXT
    assert (found.has_weights, found.revision) == (False, COMMIT)
    assert resolve_model_folder("org/model", found.revision) == found.folder
    assert find_model("org/model") == FoundModel(found.folder, True, COMMIT)


def test_only_small_files_are_fetched_for_a_tokenizer(hub):
    assert _names(resolve_text_folder("org/model")) == TEXT
    del hub.files["tokenizer.json"]
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json.*--tokenizer"):
        resolve_text_folder("org/model", "main")


def _without(*names):
    return lambda files: [files.pop(name) for name in names]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_without("tokenizer.json"), r"org/model has no tokenizer\.json"),
        (_without("config.json", "tokenizer.json"), "has neither config.json nor"),
        (
            _without("model.safetensors.index.json", "model.gguf"),
            r"only as pickles \(model\.pth, pytorch_mod",
        ),
        (
            _without(
                *("model.safetensors.index.json", "pytorch_model.bin"), "model.pth", "model.gguf"
            ),
            "has neither model.safetensors nor .*, but consolidated.safetensors",
        ),
        (_without(SHARDS[1]), f"names 2 files, of which {SHARDS[1]} does not exist"),
        (_without(*SHARDS), f"names 2 files, of which {SHARDS[0]}, {SHARDS[1]} do not exist"),
    ],
)
def test_missing_files_are_reported_before_weights_are_fetched(change, expected, hub):
    change(hub.files)
    with pytest.raises(CheckpointError, match=expected):
        resolve_model_folder("org/model", needs_tokenizer=True)
    assert not {*hub.fetched()} - TEXT


def test_a_gated_model_is_said_before_weights_are_fetched(start_hub):
    hub = start_hub(FakeHub(model_files(), gated=True))
    with pytest.raises(CheckpointError, match=r"accepted its terms.*HF_TOKEN=\.\.\."):
        resolve_model_folder("org/model")
    assert not {*hub.fetched()} - TEXT


def test_a_token_is_sent(start_hub, monkeypatch):
    hub = start_hub(FakeHub(model_files(), token="hf_secret"))
    with pytest.raises(CheckpointError, match=r"no such model, or shows it only to its owners"):
        resolve_model_folder("org/model")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert _names(resolve_model_folder("org/model")) == TEXT | {*SHARDS}
    assert {*hub.fetched()} == TEXT | {*SHARDS}


def test_unknown_revision_is_named(hub):
    with pytest.raises(CheckpointError, match=r"revision 'v9', .* no such revision"):
        resolve_model_folder("org/model", "v9")


def test_a_model_that_was_fetched_is_served_without_the_hub(hub, monkeypatch):
    folder = resolve_model_folder("org/model")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert resolve_model_folder("org/model") == folder
    assert find_model("org/model").has_weights
    assert resolve_text_folder("org/model") == folder
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert resolve_model_folder("org/model") == folder


def test_half_a_model_is_not_served_without_the_hub(hub, monkeypatch):
    folder = resolve_model_folder("org/model")
    (folder / SHARDS[1]).unlink()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match=f"of which {SHARDS[1]} does not exist"):
        resolve_model_folder("org/model")
    with pytest.raises(CheckpointError, match=r"the hub can't be reached .*refused"):
        resolve_model_folder("org/other")


def test_the_environment_names_the_hub(hub, tmp_path):
    """As a whole process reads it."""
    code = "from quire.hub.model_folder import resolve_model_folder as f; print(f('org/model'))"
    environment = os.environ | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "home"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert _names(Path(done.stdout.strip())) == TEXT | {*SHARDS}
    assert done.stdout.startswith(str(tmp_path / "home"))


def _refusal(monkeypatch, error, name="org/model", revision=None):
    """What is said where the hub's client raises `error`."""

    def fail(name, *arguments, **options):
        raise error

    if isinstance(error, OSError) and error.errno is not None:  # of files, not of the network
        listed = repository.Repository(name, revision, COMMIT, dict.fromkeys(model_files()))
        monkeypatch.setattr(fetching, "list_repository", lambda name, revision: listed)
        monkeypatch.setattr(repository, "snapshot_download", fail)
    else:
        monkeypatch.setattr(fetching, "list_repository", fail)
    with pytest.raises(CheckpointError) as caught:
        resolve_model_folder(name, revision=revision)
    message = str(caught.value)
    assert message.isprintable() and "is not a folder here" in message
    return message


def test_a_failed_lookup_mentions_folder_and_hub(monkeypatch):
    message = _refusal(monkeypatch, ConnectionError("refused\nby it"), revision="v2")
    assert "'org/model', revision 'v2', is not a folder here" in message
    assert "can't be reached" in message and "refused by it" in message
    message = _refusal(monkeypatch, ValueError("odd"))
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
        (OSError(errno.EFBIG, "File too large"), ["of its size", "ulimit -f", "HF_HOME"]),
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


def test_the_embedded_model_has_a_name_unless_a_folder_has_it(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_model_folder("embedded") == resolve_model_folder(None)
    Path("embedded").mkdir()
    assert resolve_model_folder("embedded") == Path("embedded")
    assert not hub.requests


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "~/nowhere", "a/b/c", "..\\a"])
def test_a_path_that_leads_nowhere_is_no_matter_of_the_hub(name, hub):
    with pytest.raises(CheckpointError, match="is not a folder here") as caught:
        resolve_model_folder(name)
    assert "a hub id such as" in str(caught.value)
    assert ("nor is there a folder /no/such" in str(caught.value)) is (name == "/no/such/folder")
    assert not hub.requests


def test_a_file_of_a_model_is_answered_with_its_folder(hub, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"but a model is a folder .* the folder: {tmp_path}"):
        resolve_model_folder(str(path))
    assert not hub.requests


@pytest.mark.parametrize("local", [True, False])
def test_a_revision_of_a_folder_is_refused(local, tmp_path):
    name = str(tmp_path) if local else None
    with pytest.raises(ConfigurationError, match=r"revision is 'main', but .* is a local folder"):
        resolve_model_folder(name, revision="main")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("hf.co/org/model:Q8_0", "its hub id is 'org/model:Q8_0'"),
        ("https://huggingface.co/org/model", "its hub id is 'org/model'"),
    ],
)
def test_a_name_in_the_form_of_a_browser_gets_its_hub_id(name, advice, hub):
    with pytest.raises(CheckpointError, match="is not a folder here") as caught:
        resolve_model_folder(name)
    assert str(caught.value).endswith(advice)
    assert not hub.requests


def test_a_name_without_an_owner_is_told_what_a_hub_id_looks_like(monkeypatch):
    for error in (LocalEntryNotFoundError("no"), RepositoryNotFoundError("no", response=_ANSWER)):
        message = _refusal(monkeypatch, error, "mymodel")
        assert "a hub id has an owner, as in" in message
        # No command is proposed that can't work.
        assert "hf download" not in message and "did you mean" not in message
        assert "has an owner" not in _refusal(monkeypatch, error)
        assert "; did you mean tinyllama?" in _refusal(monkeypatch, error, "tinylama")
