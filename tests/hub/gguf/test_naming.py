"""Which GGUF files are one model."""

import pytest

from quire.errors import CheckpointError
from quire.hub.gguf.naming import find_gguf, gguf_paths, models_of, quant_label

SPLIT = tuple(f"big-Q8_0-{number:05}-of-00003.gguf" for number in (1, 2, 3))


def test_files_of_a_listing_are_joined():
    names = [
        "a-Q4_0.gguf",
        "sub/a-Q8_0.GGUF",
        *SPLIT,
        "lost-00002-of-00002.gguf",
        "mmproj-F16.gguf",
        "a.imatrix.gguf",
        "imatrix-Q4_K_M.gguf",
        "a-f16-imatrix.gguf",
        "a-imatrix-Q4_K_M.gguf",
        "README.md",
    ]
    assert models_of(names) == {
        "a-Q4_0.gguf": ("a-Q4_0.gguf",),
        "a-imatrix-Q4_K_M.gguf": ("a-imatrix-Q4_K_M.gguf",),
        "sub/a-Q8_0.GGUF": ("sub/a-Q8_0.GGUF",),
        SPLIT[0]: SPLIT,
    }


@pytest.mark.parametrize(
    "name, label",
    [
        ("x-Q4_K_M.gguf", "Q4_K_M"),
        ("x.q8_0.gguf", "Q8_0"),
        ("x-UD-Q2_K_XL-00001-of-00002.gguf", "UD-Q2_K_XL"),
        ("Qwen3-0.6B-IQ4_XS.gguf", "IQ4_XS"),
        ("sub/m-bf16.gguf", "BF16"),
        ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
        ("TQ2_0.gguf", "TQ2_0"),
        ("smollm-135m-q4_k_m-imat.gguf", "Q4_K_M"),
        ("x-Q8_0-imatrix-00001-of-00002.gguf", "Q8_0"),
        ("x-imatrix-IQ4_XS.gguf", "IQ4_XS"),
        ("model.gguf", None),
        ("Qwen3-Q.gguf", None),
        ("x-Q4_0.safetensors", None),
    ],
)
def test_label_of_a_name(name, label):
    assert quant_label(name) == label


@pytest.fixture
def write(tmp_path):
    def write(*names):
        for name in names:
            (tmp_path / name).write_bytes(b"GGUF")
        return tmp_path

    return write


def test_a_file_or_a_folder_with_one_model(write):
    folder = write("a-Q4_0.gguf", "mmproj-F16.gguf")
    assert find_gguf(folder) == find_gguf(folder / "a-Q4_0.gguf") == folder / "a-Q4_0.gguf"
    assert gguf_paths(folder) == [folder / "a-Q4_0.gguf"]
    renamed = folder / "weights.bin"
    renamed.write_bytes(b"GGUF")
    assert gguf_paths(renamed) == [renamed]


def test_all_files_of_a_split_model_are_needed(write):
    folder = write(*SPLIT)
    assert gguf_paths(folder) == gguf_paths(folder / SPLIT[0]) == [folder / name for name in SPLIT]
    with pytest.raises(CheckpointError, match=f"name the first one, {SPLIT[0]}"):
        find_gguf(folder / SPLIT[2])
    (folder / SPLIT[1]).unlink()
    with pytest.raises(CheckpointError, match=f"first of 3 files, of which {SPLIT[1]} does not"):
        gguf_paths(folder)


def test_several_models_in_a_folder_are_named(write):
    folder = write("a-Q4_0.gguf", *SPLIT)
    with pytest.raises(
        CheckpointError, match=f"several models in GGUF format, a-Q4_0.gguf, {SPLIT[0]};"
    ):
        find_gguf(folder)


def test_files_that_are_no_gguf_models_are_not_found(write, tmp_path):
    assert find_gguf(write("mmproj-F16.gguf")) is None
    assert find_gguf(tmp_path / "nowhere") is None
    other = tmp_path / "x.bin"
    other.write_bytes(b"PK")
    assert find_gguf(other) is None
    with pytest.raises(CheckpointError, match="is not a model in GGUF format and contains none"):
        gguf_paths(tmp_path)
