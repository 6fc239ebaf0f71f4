"""Weight files that are missing, cut off or of another kind, found by their headers."""

from pathlib import Path

import pytest

from quire.errors import CheckpointError
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.hub.weight_check import check_weight_files
from quire.hub.weight_files import SINGLE_FILE


def test_a_whole_model_is_accepted() -> None:
    check_weight_files(EMBEDDED_MODEL)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("pytorch_model.bin", b"x", "only as pickles"),
        (SINGLE_FILE, b"\x10\0\0\0\0\0\0\0{}", "its header alone has 24"),
        (SINGLE_FILE, b"version https://git-lfs.github.com/spec/v1\n", "a pointer of git-LFS"),
        ("other.safetensors", b"", "has neither model.safetensors nor"),
    ],
)
def test_a_broken_folder_is_refused(name: str, content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=reason):
        check_weight_files(tmp_path)


def test_a_broken_gguf_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0")
    with pytest.raises(CheckpointError, match="is not a whole GGUF file"):
        check_weight_files(path)
