"""The fingerprint of pages: equal parts and no others have one, in every process."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.tiers.fingerprint import DIGEST_BYTES, Fingerprint, read_description

PARTS = Fingerprint(
    weights="00" * 16,
    model={"type": "LlamaConfig", "eps": 1e-5, "windows": (None, 64)},
    pages={"block_size": 16, "groups": [{"kind": "full", "layers": [0, 1]}]},
    numerics={"kernels": "avx2", "torch": {"version": "2.13"}},
    code={"quire": "ab"},
    label="org/model",
)


def test_the_digest_is_of_the_parts_in_any_order() -> None:
    assert len(PARTS.digest) == DIGEST_BYTES
    assert (
        PARTS.digest.hex() == "729ad2083b8aca85d2165346c48a4684"
    )  # never another: it is the name of folders
    turned = replace(PARTS, model=dict(reversed(PARTS.model.items())), label="a copy of it")
    assert turned.digest == PARTS.digest


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "01" * 16},
        {"model": {**PARTS.model, "eps": 1e-6}},
        {"model": {**PARTS.model, "windows": (64, None)}},
        {"pages": {**PARTS.pages, "block_size": 32}},
        {"numerics": {"kernels": "avx512", "torch": {"version": "2.13"}}},
        {"numerics": {"kernels": "avx2", "torch": {"version": "2.14"}}},
        {"numerics": {"kernels": "avx2", "torch": {"version": 2.13}}},
        {"code": {}},
    ],
)
def test_each_part_counts(change: dict[str, Any]) -> None:
    other = replace(PARTS, **change)
    assert other.digest != PARTS.digest
    assert len(other.differences(PARTS)) == 1


def test_a_difference_is_named() -> None:
    other = replace(PARTS, numerics={"kernels": "torch", "torch": {"version": "2.13"}})
    assert other.differences(PARTS) == ["numerics.kernels is 'torch' instead of 'avx2'"]
    other = replace(PARTS, code={})
    assert other.differences(PARTS) == ["code.quire is 'nothing' instead of 'ab'"]
    assert PARTS.differences(replace(PARTS, label="another name")) == []


def test_it_is_read_back_as_it_was_written() -> None:
    read = Fingerprint.from_json(PARTS.to_json())
    assert (read.digest, read.label, read.differences(PARTS)) == (PARTS.digest, "org/model", [])


@pytest.mark.parametrize("change", [{"format": 2}, {"weights": 7}, {"model": None}, {"more": 1}])
def test_another_description_is_refused(change: dict[str, Any]) -> None:
    text = json.dumps(json.loads(PARTS.to_json()) | change)
    with pytest.raises(ValueError, match="description"):
        Fingerprint.from_json(text.encode())
    for other in (b"", b"{", b"[]", b"\xff", text.encode()[:-1]):
        with pytest.raises(ValueError):  # JSON's own and ours
            Fingerprint.from_json(other)


def test_numbers_that_json_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        _ = replace(PARTS, model={"eps": float("nan")}).digest


NESTED = json.dumps(json.loads(PARTS.to_json()) | {"model": {"a": "deep"}})


@pytest.mark.parametrize(
    "content",
    [
        *(b"[" * 100_000, b"\xff", b"{}", PARTS.to_json()),
        NESTED.replace('"deep"', "NaN").encode(),
        NESTED.replace('"deep"', "[" * 600 + "]" * 600).encode(),
    ],
)
def test_a_description_that_is_damaged_describes_nothing(tmp_path: Path, content: bytes) -> None:
    name = "0" * 32  # of another one, so not even a sound text is its own
    (tmp_path / f"{name}.json").write_bytes(content)
    assert read_description(tmp_path, name) is None
