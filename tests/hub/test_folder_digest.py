"""A digest that tells models apart, wherever they lie."""

from pathlib import Path

from quire.hub.folder_digest import folder_digest


def test_a_model_is_its_structure_not_its_place(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"header")
        (tmp_path / name / f"{name}.txt").write_text(name)
    one, two = folder_digest(tmp_path / "one"), folder_digest(tmp_path / "two")
    assert one == two
    (tmp_path / "two" / "config.json").write_text('{"layers": 2}')
    assert folder_digest(tmp_path / "two") != one
    assert folder_digest(tmp_path / "one" / "model.safetensors") != one


def test_models_of_one_structure_differ_by_their_weights(tmp_path: Path) -> None:
    content = bytearray(4 << 20)
    digests = set()
    for place in (None, 3 << 20, (4 << 20) - 1):
        if place is not None:
            content[place - 2000 : place + 1] = b"x" * 2001
        (tmp_path / "model.gguf").write_bytes(content)
        digests.add(folder_digest(tmp_path / "model.gguf"))
    assert len(digests) == 3
