"""Only what the operator allows is read, and each refusal is one sentence."""

import base64
import os
from pathlib import Path

import pytest

from quire.errors import InvalidRequestError
from quire.images.decode import MAX_FILE_BYTES
from quire.images.image_options import ImageOptions
from quire.images.sources import ImageSources, is_remote

WHERE = "messages[0].content[0]"
ONLY_DATA = ImageSources(ImageOptions())


def refusal(sources: ImageSources, url: str) -> str:
    with pytest.raises(InvalidRequestError) as refused:
        sources.read(url, WHERE)
    assert refused.value.param == "messages" and "\n" not in str(refused.value)
    return str(refused.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an image and ways out of it."""
    inner = tmp_path / "images"
    inner.mkdir()
    (inner / "a b.png").write_bytes(b"inside")
    (inner / "more").mkdir()
    (tmp_path / "secret").write_bytes(b"outside")
    (inner / "out").symlink_to(tmp_path / "secret")
    (inner / "in").symlink_to(inner / "a b.png")
    (inner / "loop").symlink_to(inner / "loop")
    os.mkfifo(inner / "pipe")
    return inner


def test_data_urls_are_read() -> None:
    data = bytes(range(256))
    text = base64.b64encode(data).decode()
    lines = "\n".join(text[at : at + 60] for at in range(0, len(text), 60))
    escaped = text.replace("=", "%3D").replace("+", "%2B")
    for url in (
        f"data:image/png;base64,{text}",
        f"DATA:image/jpeg;name=x.jpg;BASE64,{lines}",
        f"data:;base64,{escaped}",
    ):
        assert ONLY_DATA.read(url, WHERE) == data
        assert not is_remote(url)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64", "without a comma"),
        ("data:image/png," + "a" * 300, "without base64"),
        ("data:text/html;base64,aGk=", "must be an image"),
        ("data:image/png;base64,a*b=", "is not valid base64"),
        ("data:image/png;base64,a", "is not valid base64"),
        ("data:image/png;base64," + "A" * (MAX_FILE_BYTES * 4 // 3 + 8), "more than"),
        ("https://example.com/a.png", "of the scheme https, which is not allowed here; use data:"),
        ("http://example.com/a.png", "of the scheme http, which is not allowed here; use data:"),
        ("file:///etc/passwd", "of the scheme file, which is not allowed here"),
        ("ftp://example.com/a.png", "is no URL of an image"),
        ("/etc/passwd", "is no URL of an image"),
        ("", "is no URL of an image"),
    ],
)
def test_other_urls_are_refused(url: str, reason: str) -> None:
    assert reason in refusal(ONLY_DATA, url)


def test_files_below_the_folder_are_read(folder: Path) -> None:
    sources = ImageSources(ImageOptions(allowed_local_media_path=str(folder)))
    for name in ("a%20b.png", "more/../a%20b.png", "in"):
        assert sources.read(f"file://{folder}/{name}", WHERE) == b"inside"
    assert sources.read(f"file://localhost{folder}/in", WHERE) == b"inside"


def test_no_way_leads_out_of_the_folder(folder: Path) -> None:
    sources = ImageSources(ImageOptions(allowed_local_media_path=str(folder)))
    paths = ["out", "../secret", "%2e%2e/secret", "..%2fsecret", "loop", "pipe", "more", "missing"]
    paths += ["a%00b", "%ff", "x" * 300]
    urls = [f"file://{folder}/{path}" for path in paths]
    urls += [f"file://host{folder}/in", "file:secret", "file:///etc/passwd", "file://[bad/in"]
    sentences = {refusal(sources, url) for url in urls}
    assert sentences == {
        f"the image {WHERE} is not a file in the folder from which this server may read images"
    }
