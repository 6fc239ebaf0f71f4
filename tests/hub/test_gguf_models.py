"""Models in GGUF format: files and folders here, and which of a hub's repository is fetched."""

import errno
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from tests.gguf_writer import header, tensor_info, text, value
from tests.hub.conftest import model_files
from tests.hub.hub_server import COMMIT, FakeHub

from quire.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from quire.hub import fetching
from quire.hub.found_model import FoundModel
from quire.hub.gguf import remote_headers
from quire.hub.gguf.choice import choose_gguf
from quire.hub.gguf.header import read_gguf
from quire.hub.gguf.image_encoder import find_image_encoder
from quire.hub.gguf.naming import gguf_paths
from quire.hub.model_folder import find_model, resolve_model_folder, resolve_text_folder

START = b"GGUF\x03\0\0\0"
PARTS = tuple(f"tiny-BF16-{part:05}-of-00002.gguf" for part in (1, 2))


def gguf_files() -> dict[str, bytes]:
    """As publishers of GGUF have them: quantizations, one of them in two files, and no models."""
    names = ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", *(f"BF16/{part}" for part in PARTS))
    others = ("imatrix.gguf", "README.md", "config.json")
    models = {name: model_file(name) for name in names}
    return models | {name: START + name.encode() for name in others} | encoder_files()


def encoder_files(names: tuple[str, ...] = ("mmproj-F16.gguf",), kind: str = "x") -> dict:
    """Files with encoders whose projector is of this kind."""
    return {name: model_file(name, {"clip.projector_type": kind}) for name in names}


def model_file(name: str, more: Mapping[str, Any] | None = None) -> bytes:
    """A header of 30,000 bytes, and twice as many of weights."""
    given = {"general.name": name, "notes": "x" * 30_000, **(more or {})}
    fields = [text(key) + value(found) for key, found in given.items()]
    start = header(fields, [tensor_info("a", (15_000,), 0, 0)])
    return start + bytes(-len(start) % 32) + os.urandom(60_000)


@pytest.fixture
def gguf_hub(start_hub) -> FakeHub:
    remote_headers._folder.cache_clear()  # of another test's hub, which had the same name
    return start_hub(FakeHub(gguf_files(), "org/tiny-GGUF"))


def ggufs(hub: FakeHub) -> list[str]:
    """The models whose content was asked for."""
    names = [name for name in hub.fetched() if name.endswith(".gguf")]
    return sorted(name for name in names if "mmproj" not in name)


def test_a_file_and_a_folder_with_one_are_the_file(hub, tmp_path):
    for name in ("tiny.gguf", "renamed.bin", "TINY.GGUF"):
        path = tmp_path / name
        path.write_bytes(START)
        assert resolve_model_folder(str(path)) == resolve_text_folder(str(path)) == path
        assert find_model(str(path)) == FoundModel(path)
        path.unlink()
    for name in PARTS:
        (tmp_path / name).write_bytes(START)
    (tmp_path / "mmproj-F16.gguf").write_bytes(START)
    first = tmp_path / PARTS[0]
    assert resolve_model_folder(str(tmp_path)) == resolve_model_folder(str(first)) == first
    with pytest.raises(ConfigurationError, match=r"revision is 'main', but .* is a local file"):
        resolve_model_folder(str(first), "main")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_model_folder(str(tmp_path)) == tmp_path
    assert not hub.requests


def test_folders_without_exactly_one_complete_model_are_refused(hub, tmp_path):
    for name in (PARTS[0], "tiny-Q8_0.gguf"):
        (tmp_path / name).write_bytes(START)
    with pytest.raises(CheckpointError, match=r"several models .*BF16-00001.*tiny-Q8_0.gguf; name"):
        resolve_model_folder(str(tmp_path))
    with pytest.raises(CheckpointError, match=f"first of 2 files, of which {PARTS[1]} does not"):
        resolve_model_folder(str(tmp_path / PARTS[0]))
    (tmp_path / PARTS[1]).write_bytes(START)
    with pytest.raises(CheckpointError, match=f"a later part .*name the first one, {PARTS[0]}"):
        resolve_model_folder(str(tmp_path / PARTS[1]))
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"empty\.gguf is not a whole GGUF file: it is empty"):
        resolve_model_folder(str(tmp_path / "empty.gguf"))
    (tmp_path / "page.gguf").write_bytes(b"<!doctype html>")
    with pytest.raises(CheckpointError, match=r"page\.gguf is a web page, not the file itself"):
        find_model(str(tmp_path / "page.gguf"))
    with pytest.raises(CheckpointError, match=r"there is no file 'no\.gguf' here$"):
        resolve_model_folder("no.gguf")
    with pytest.raises(CheckpointError, match=r"for a file of the hub, give a/b:c\.gguf"):
        resolve_model_folder("a/b/c.gguf")
    with pytest.raises(CheckpointError, match="is not a folder here"):
        resolve_model_folder("a/b/c:Q8_0")
    assert not hub.requests


@pytest.mark.parametrize(
    ("choice", "files"),
    [
        (":Q8_0", ["tiny-Q8_0.gguf"]),
        (":q4_k_m", ["tiny-Q4_K_M.gguf"]),
        (":tiny-q8_0.GGUF", ["tiny-Q8_0.gguf"]),
        (":bf16", [f"BF16/{part}" for part in PARTS]),
        ("", ["tiny-Q4_K_M.gguf"]),
    ],
)
def test_only_the_chosen_files_of_a_repository_are_fetched(gguf_hub, cache, choice, files, caplog):
    with caplog.at_level(logging.WARNING):
        path = resolve_model_folder("org/tiny-GGUF" + choice, needs_tokenizer=True)
    snapshot = cache / "models--org--tiny-GGUF" / "snapshots" / COMMIT
    assert path == snapshot / files[0]
    assert {*ggufs(gguf_hub)} == {*files}, "of the first file, the header may come first"
    assert path.read_bytes() == gguf_hub.files[files[0]]
    said = [each.getMessage() for each in caplog.records if "is served in" in each.getMessage()]
    assert said == ([] if choice else [said[0]])
    assert choice or "from tiny-Q4_K_M.gguf; org/tiny-GGUF:" in said[0]
    gguf_hub.requests.clear()
    assert find_model("org/tiny-GGUF" + choice) == FoundModel(path, True, COMMIT)
    assert resolve_text_folder("org/tiny-GGUF" + choice) == path
    assert not ggufs(gguf_hub)


FITTING = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
}
IDEFICS = {
    "clip.projector_type": "idefics3",
    "clip.use_gelu": True,
    **{
        f"clip.vision.{name}": count
        for name, count in {
            "projection_dim": 64,
            "embedding_length": 32,
            "feed_forward_length": 48,
            "block_count": 1,
            "attention.head_count": 2,
            "image_size": 16,
            "patch_size": 8,
            "projector.scale_factor": 1,
            "attention.layer_norm_epsilon": 1e-6,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        }.items()
    },
}
"""The metadata of a model, and of an encoder that fits it."""


def test_the_encoder_beside_a_model_is_fetched_with_it(start_hub, cache, monkeypatch):
    """One of several: the first of the preferred types."""
    remote_headers._folder.cache_clear()
    encoders = ("mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-Q8_0.gguf", "in/mmproj-F16.gguf")
    files = {name: model_file(name, IDEFICS) for name in encoders}
    hub = start_hub(FakeHub(files | {"a-Q8_0.gguf": model_file("a", FITTING)}, "org/a-GGUF"))
    text_only = resolve_model_folder("org/a-GGUF:Q8_0", takes_images=False)
    assert hub.fetched() == ["a-Q8_0.gguf"]
    found = find_model("org/a-GGUF:Q8_0")
    assert not found.has_weights and found.folder != text_only
    encoder = find_image_encoder(found.folder)
    assert encoder is not None and encoder.path.name == "mmproj-BF16.gguf"
    path = resolve_model_folder("org/a-GGUF:Q8_0")
    assert path == text_only
    fetched = path.with_name("mmproj-BF16.gguf")
    assert fetched.read_bytes() == hub.files["mmproj-BF16.gguf"]
    assert {*hub.fetched()} == {"a-Q8_0.gguf", "mmproj-BF16.gguf"}
    hub.requests.clear()
    assert find_model("org/a-GGUF:Q8_0") == FoundModel(path, True, COMMIT)
    assert not hub.fetched()
    encoder = find_image_encoder(path)
    assert encoder is not None and encoder.path == fetched
    # Another one that is in the cache is taken.
    fetched.rename(path.with_name("mmproj-F32.gguf"))
    assert resolve_model_folder("org/a-GGUF:Q8_0") == path
    assert not hub.fetched()


def test_the_encoder_above_a_models_folder_is_fetched_with_it(start_hub, cache):
    """Repositories with a folder for each quantization have the encoder at their root."""
    remote_headers._folder.cache_clear()
    files = {name: model_file(name, IDEFICS) for name in ("mmproj-F16.gguf", "other/mmproj.gguf")}
    models = {f"{label}/a-{label}.gguf": model_file("a", FITTING) for label in ("BF16", "Q8_0")}
    hub = start_hub(FakeHub(files | models, "org/b-GGUF"))
    path = resolve_model_folder("org/b-GGUF:Q8_0")
    assert {*hub.fetched()} == {"Q8_0/a-Q8_0.gguf", "mmproj-F16.gguf"}
    encoder = find_image_encoder(path)
    assert encoder is not None and encoder.path == path.parent.with_name("mmproj-F16.gguf")
    # The one beside the model goes first.
    beside = path.with_name("mmproj-BF16.gguf")
    beside.write_bytes(hub.files["mmproj-F16.gguf"])
    encoder = find_image_encoder(path)
    assert encoder is not None and encoder.path == beside


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"clip.projector_type": "x"}, "projector_type is x"),
        ({**IDEFICS, "clip.new": 1}, "clip.new"),
    ],
)
def test_an_encoder_that_is_not_read_is_not_fetched(start_hub, metadata, said, caplog):
    remote_headers._folder.cache_clear()
    fetching._warn_once.cache_clear()
    files = {"a-Q8_0.gguf": model_file("a", FITTING), "mmproj-F16.gguf": model_file("m", metadata)}
    start_hub(FakeHub(files, "org/a-GGUF"))
    for _ in range(2):
        found = find_model("org/a-GGUF:Q8_0")
        assert not found.has_weights and find_image_encoder(found.folder) is None
    path = resolve_model_folder("org/a-GGUF:Q8_0")
    assert [each.name for each in path.parent.iterdir() if each.name.endswith("gguf")] == [
        path.name
    ]
    (message,) = [each.getMessage() for each in caplog.records if "images" in each.getMessage()]
    assert said in message


def test_a_header_that_finds_no_room_names_its_folder(gguf_hub, monkeypatch):
    def fill(*arguments: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(remote_headers, "http_get", fill)
    with pytest.raises(CheckpointError, match=r"tiny-Q8_0\.gguf can't be stored in .*TMPDIR"):
        find_model("org/tiny-GGUF:Q8_0")


@pytest.mark.parametrize("first_bytes", [40_000, 1_000, 1])
def test_the_header_comes_first_and_is_checked(first_bytes, gguf_hub, monkeypatch):
    monkeypatch.setattr(remote_headers, "FIRST_BYTES", first_bytes)
    monkeypatch.setattr(remote_headers, "LATER_BYTES", first_bytes)
    name = "org/tiny-GGUF:BF16"
    found = find_model(name)
    assert (found.has_weights, found.revision) == (False, COMMIT)
    assert found.named_for_others(name) == (name, COMMIT)
    assert found.name_for_clients(name) == name
    assert read_gguf(found.folder).metadata["general.name"] == f"BF16/{PARTS[0]}"
    assert found.folder.stat().st_size == len(gguf_hub.files[f"BF16/{PARTS[0]}"])
    assert gguf_paths(found.folder) == [found.folder, found.folder.with_name(PARTS[1])]
    asked = gguf_hub.ranges(PARTS[0])
    assert asked[0] == f"bytes=0-{first_bytes - 1}"
    assert len(asked) == {40_000: 1, 1_000: 4, 1: 9}[first_bytes]
    assert resolve_text_folder(name) == found.folder

    def check(folder: Path) -> None:
        assert folder == found.folder
        raise UnsupportedModelError("not this one")

    with pytest.raises(UnsupportedModelError, match="not this one"):
        resolve_model_folder(name, check=check)
    assert gguf_hub.ranges(PARTS[0]) == asked


def test_a_hub_that_knows_no_ranges_is_cut_off(gguf_hub, monkeypatch):
    gguf_hub.takes_ranges = False
    monkeypatch.setattr(remote_headers, "FIRST_BYTES", 40_000)
    found = find_model("org/tiny-GGUF:Q8_0")
    content = found.folder.read_bytes()
    assert content[:40_000] == gguf_hub.files["tiny-Q8_0.gguf"][:40_000]
    assert not any(content[40_000:])


def test_invalid_gguf_file_at_the_hub_is_named(gguf_hub):
    gguf_hub.files["tiny-Q8_0.gguf"] = b"GGUF" + bytes(100)
    with pytest.raises(CheckpointError, match=r"resolve/.*/tiny-Q8_0\.gguf is a GGUF file of ver"):
        find_model("org/tiny-GGUF:Q8_0")


def test_it_is_served_without_the_hub(gguf_hub, monkeypatch):
    path = resolve_model_folder("org/tiny-GGUF:Q8_0")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    for name in ("org/tiny-GGUF:Q8_0", "org/tiny-GGUF:q8_0", "org/tiny-GGUF"):
        assert resolve_model_folder(name) == resolve_text_folder(name) == path
        assert find_model(name).folder == path
    with pytest.raises(
        CheckpointError, match=r"no model 'BF16' .*in the cache, and the hub gives.*but Q8_0; "
    ):
        resolve_model_folder("org/tiny-GGUF:BF16")
    with pytest.raises(CheckpointError, match=r"the hub can't be reached"):
        resolve_model_folder("org/other-GGUF:Q8_0")


def test_the_format_of_hugging_face_goes_first(start_hub):
    hub = start_hub(FakeHub(model_files() | gguf_files()))
    assert resolve_model_folder("org/model").is_dir()
    assert not ggufs(hub)
    assert resolve_model_folder("org/model:Q8_0").name == "tiny-Q8_0.gguf"
    assert resolve_text_folder("org/model").is_dir()


@pytest.mark.parametrize(
    ("names", "choice", "message"),
    [
        (
            ["a-Q8_0.gguf", "a-Q5_K_S.gguf"],
            None,
            r"2 models.*: Q5_K_S, Q8_0; .* org/m:Q5_K_S does$",
        ),
        (["a-Q8_0.gguf"], "Q4_0", r"no model 'Q4_0' .*, but Q8_0; name one, as org/m:Q8_0 does$"),
        (
            ["a-Q8_0.gguf", "b-Q8_0.gguf"],
            "Q8_0",
            r"2 models .* that 'Q8_0' may mean: a-Q8_0\.gguf, b-Q8",
        ),
        (
            ["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"],
            None,
            r"has 2 models in GGUF format: a-Q4_K_M\.gguf, b-Q",
        ),
        (["model.safetensors"], "Q8_0", "has no models in GGUF format, .* leave out ':Q8_0'"),
        (["a.gguf"], "", "no model '' in GGUF format, but a"),
    ],
)
def test_an_ambiguous_choice_lists_the_files(names, choice, message):
    with pytest.raises(CheckpointError, match=message):
        choose_gguf("org/m", names, choice)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("UD-Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        ("iq4_xs", "m-IQ4_XS.gguf"),
        ("custom", "m-custom.gguf"),
        ("m-custom", "m-custom.gguf"),
        ("deep", "deep/m-Q2_K.gguf"),
        ("deep/m-Q2_K", "deep/m-Q2_K.gguf"),
    ],
)
def test_a_choice_may_be_a_label_a_name_or_a_folder(choice, expected):
    names = ["m-UD-Q4_K_XL.gguf", "m-IQ4_XS.gguf", "m-custom.gguf", "deep/m-Q2_K.gguf"]
    assert choose_gguf("org/m", names, choice) == (expected,)
    assert choose_gguf("org/m", [], None) == ()


def test_imatrix_files_are_chosen_by_their_quantization():
    names = ["m-q4_k_m-imat.gguf", "m-q8_0-imat.gguf", "m-imatrix.gguf"]
    for choice in (None, "Q4_K_M"):
        assert choose_gguf("org/m", names, choice) == ("m-q4_k_m-imat.gguf",)
        both = [*names, "m-q4_k_m.gguf"]  # the plain one is what was asked for
        assert choose_gguf("org/m", both, choice) == ("m-q4_k_m.gguf",)
    assert choose_gguf("org/m", names, "q8_0-imat") == ("m-q8_0-imat.gguf",)
