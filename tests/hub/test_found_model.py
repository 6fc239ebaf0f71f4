"""How a model that was found is named for another process."""

from pathlib import Path

from quire.hub.found_model import FoundModel


def test_a_complete_model_is_named_by_folder_and_others_by_commit():
    assert FoundModel(Path("/m")).named_for_others("m") == ("/m", None)
    assert FoundModel(Path("/c/s/abc"), False, "abc").named_for_others("o/m") == ("o/m", "abc")


def test_clients_know_a_gguf_file_by_its_stem(tmp_path):
    for file, name in (
        ("tiny-Q8_0.gguf", "tiny-Q8_0"),
        ("big-BF16-00001-of-00002.gguf", "big-BF16"),
        ("weights.bin", "weights.bin"),
    ):
        path = tmp_path / file
        path.write_bytes(b"GGUF")
        assert FoundModel(path).name_for_clients(str(path)) == name
        assert FoundModel(path).name_for_clients("org/model:Q8_0") == "org/model:Q8_0"
    assert FoundModel(tmp_path).name_for_clients(str(tmp_path)) == str(tmp_path)
