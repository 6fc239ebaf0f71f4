"""Forms with a file, cut into pieces at every place."""

import asyncio

import pytest

from quire.errors import InvalidRequestError
from quire.server.http.multipart import MAX_FIELD_BYTES, MAX_FIELDS, FormReader

TYPE = 'multipart/form-data; boundary="x-y"'
CONTENT = b'{"a": 1}\r\n--x-\r\n--x-z\n'


def part(name, content, more=""):
    return (
        f'--x-y\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + content
    )


FILE = part("file", CONTENT, '; filename="käse.jsonl"') + b"\r\n"
BODY = part("purpose", b"batch\r\n") + FILE + b"--x-y--\r\n"


def read(body, size=1 << 20, content_type=TYPE):
    async def pieces():
        for at in range(0, len(body), size):
            yield body[at : at + size]

    found = bytearray()
    form = asyncio.run(FormReader(content_type, "file", found.extend).read(pieces()))
    return form, bytes(found)


@pytest.mark.parametrize("size", [*range(1, 40), 1000])
def test_a_form_is_read_however_it_is_cut(size):
    form, content = read(BODY, size)
    assert content == CONTENT
    assert (form.fields, form.filename) == ({"purpose": "batch"}, "käse.jsonl")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("filename*=UTF-8''k%C3%A4se", "käse"),
        ("filename*=''%ff", "\ufffd"),
        ("a=b", ""),
    ],
)
def test_the_file_s_name_may_be_encoded(given, name):
    form, _ = read(part("file", b"", f"; {given}") + b"\r\n--x-y--")
    assert form.filename == name


@pytest.mark.parametrize("boundary", ['""', "x" * 71])
def test_boundaries_have_a_length(boundary):
    with pytest.raises(InvalidRequestError, match="must have 1 to 70"):
        read(b"", content_type=f"multipart/form-data; boundary={boundary}")


def test_the_file_is_passed_on_before_the_body_has_ended():
    written = []
    reader = FormReader(TYPE, "file", written.append)

    async def pieces():
        yield part("file", b"x" * 1000, '; filename="f"')
        assert sum(map(len, written)) > 900
        yield b"\r\n--x-y--"

    asyncio.run(reader.read(pieces()))
    assert b"".join(written) == b"x" * 1000


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "ends before its last boundary"),
        (BODY[:-4], "ends before its last boundary"),
        (b"--x-yz\r\n", "not followed by a new line"),
        (b"--x-y\r\nA: b\r\n\r\nx\r\n--x-y--", "a part has no name"),
        (FILE + FILE + b"--x-y--", "two fields 'file'"),
        (b"--x-y\r\n" + b"A" * 9000, "bytes of headers"),
        (part("file", b"", f'; a="{"A" * 9000}"'), "bytes of headers"),
        (part("file", b"", "; filename*=utf-7''+2AA-"), "name is not in UTF-8"),
        (part("file", b"", "; filename*=idna''xn--a"), "name is not in UTF-8"),
        (part("purpose", b"x" * (MAX_FIELD_BYTES + 99)), "field 'purpose' has more than"),
        (part("a", b"\r\n") * 2 + b"--x-y--", "two fields 'a'"),
        (
            b"".join(part(str(n), b"\r\n") for n in range(MAX_FIELDS + 1)) + b"--x-y--",
            "more than 16 fields",
        ),
    ],
)
def test_a_malformed_form_is_refused(body, reason):
    with pytest.raises(InvalidRequestError, match=reason):
        read(body)


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data", ""])
def test_another_content_type_is_refused(kind):
    with pytest.raises(InvalidRequestError, match="must be multipart/form-data"):
        read(BODY, content_type=kind)
