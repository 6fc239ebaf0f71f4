"""Files become upright RGB pictures, or are refused in one sentence."""

import struct
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.images.pictures import file_of, random_picture

from quire.errors import InvalidRequestError
from quire.images.decode import FORMATS, MAX_PIXELS, check_image, decode_image

WHERE = "messages[0].content[1]"


def pixels_of(picture: Image.Image) -> Any:
    return np.asarray(picture)


def png(width: int, height: int, data: bytes) -> bytes:
    """A PNG file of 8-bit grey values with this compressed data."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))]
    parts = [b"\x89PNG\r\n\x1a\n"]
    for name, content in [*chunks, (b"IDAT", data), (b"IEND", b"")]:
        crc = struct.pack(">I", zlib.crc32(name + content))
        parts.append(struct.pack(">I", len(content)) + name + content + crc)
    return b"".join(parts)


@pytest.mark.parametrize("kind", FORMATS)
def test_all_formats_are_read(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    found = decode_image(file_of(random_picture(21, 13), kind, **options), WHERE)
    assert (found.mode, found.size) == ("RGB", (21, 13))
    if kind in ("PNG", "BMP", "WEBP"):
        assert (pixels_of(found) == pixels_of(random_picture(21, 13))).all()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr"])
def test_all_modes_become_rgb(mode: str) -> None:
    picture = random_picture(9, 7).convert(mode)
    kind = "JPEG" if mode in ("CMYK", "YCbCr") else "PNG"
    found = decode_image(file_of(picture, kind), WHERE)
    assert (found.mode, found.size) == ("RGB", (9, 7))


def test_transparent_parts_become_white() -> None:
    picture = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    picture.putpixel((1, 0), (255, 0, 0, 0))
    assert pixels_of(decode_image(file_of(picture), WHERE)).tolist() == [
        [[255, 0, 0], [255, 255, 255]]
    ]


def test_grey_values_of_16_bits_keep_their_upper_half() -> None:
    grey = np.array([[0, 255, 256, 32768, 65535]], np.uint16)
    found = decode_image(file_of(Image.fromarray(grey)), WHERE)
    assert pixels_of(found)[0, :, 0].tolist() == [0, 0, 1, 128, 255]


@pytest.mark.parametrize(("turn", "size"), [(1, (3, 2)), (3, (3, 2)), (6, (2, 3)), (8, (2, 3))])
def test_the_picture_is_upright(turn: int, size: tuple[int, int]) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    picture = random_picture(3, 2)
    data = file_of(picture, exif=exif.tobytes())
    opened = Image.open(BytesIO(data))
    quarters = {1: 0, 3: 2, 6: 3, 8: 1}[turn]
    for found in (decode_image(data, WHERE), check_image(opened, WHERE)):
        assert found.size == size
        assert (pixels_of(found) == np.rot90(pixels_of(picture), quarters)).all()
        assert check_image(found, WHERE) is found, "it is not turned twice"
    assert opened.size == (3, 2), "the caller's picture stays as it is"


def test_broken_exif_data_is_ignored() -> None:
    data = b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\x12\x01\x03\0\xff\xff\xff\xff\xff\xff\xff\xff"
    assert decode_image(file_of(random_picture(3, 2), "JPEG", exif=data), WHERE).size == (3, 2)


def test_an_animation_gives_its_first_frame() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    for kind in ("GIF", "PNG", "WEBP"):
        data = file_of(frames[0], kind, save_all=True, append_images=frames[1:])
        red, green, blue = pixels_of(decode_image(data, WHERE))[0, 0]
        assert red > 200 and green < 50 and blue < 50


def jpeg_with_scans(num_scans: int) -> bytes:
    """A progressive JPEG file whose last scan occurs num_scans times more."""
    data = file_of(Image.new("L", (64, 64)), "JPEG", progressive=True)
    return data[:-2] + data[data.rindex(b"\xff\xda") : -2] * num_scans + data[-2:]


def test_scans_outside_of_the_picture_do_not_count() -> None:
    scans, picture = b"\xff\xda\0\2" * 999, jpeg_with_scans(9)
    comment = b"\xff\xfe" + struct.pack(">H", 2 + len(scans)) + scans
    for data in (picture, picture[:2] + comment + picture[2:], picture + scans):
        assert decode_image(data, WHERE).size == (64, 64)


CUT = file_of(random_picture(40, 40))
BOMB = zlib.compress(b"\0" * (1 << 20))
WIDE_WEBP = b"RIFF\x40\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + b"\xff" * 6 + b"\0" * 40


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no image of the formats PNG, JPEG, WEBP, GIF, BMP"),
        (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "no image of the formats"),
        (b"%PDF-1.7\n", "no image of the formats"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image of the formats"),
        (file_of(random_picture(4, 4), "TIFF"), "no image of the formats"),
        (CUT[: len(CUT) // 2], "can't be decoded"),
        (png(30000, 30000, BOMB), "has too many pixels; the bound is"),
        (png(6000, 6000, BOMB), "above the bound"),
        (png(300, 300, b"no zlib"), "can't be decoded"),
        (png(0, 300, BOMB), "messages"),
        (WIDE_WEBP, "has 16777216 x 16777216 pixels"),
        (b"GIF89a" + b"\xff" * 40, "messages"),
        (b"BM" + bytes(60), "can't be decoded"),
        (jpeg_with_scans(999), "is a JPEG file of more than 64 scans"),
    ],
)
def test_hostile_files_are_refused_in_one_sentence(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as refused:
        decode_image(data, WHERE)
    assert str(refused.value).startswith(f"the image {WHERE} ")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300
    assert refused.value.param == "messages"


def test_a_file_behind_an_image_is_not_read() -> None:
    picture = random_picture(5, 5)
    found = decode_image(file_of(picture) + b"<script>" + file_of(picture, "JPEG"), WHERE)
    assert (pixels_of(found) == pixels_of(picture)).all()


def test_pictures_of_the_caller_are_checked() -> None:
    picture = random_picture(6, 4)
    assert check_image(picture, WHERE) is picture
    array = pixels_of(picture)
    assert (pixels_of(check_image(array, WHERE)) == array).all()
    assert check_image(array[:, :, :1], WHERE).mode == check_image(array[:, :, 0], WHERE).mode
    for wrong in (array.astype(np.float32), array[None], array[:0], b"", 7, BytesIO()):
        with pytest.raises(InvalidRequestError, match=r"but must be"):
            check_image(wrong, WHERE)
    for broken in (Image.open(BytesIO(CUT[: len(CUT) // 2])), Image.new("La", (2, 2))):
        with pytest.raises(InvalidRequestError, match=r"can't be read as RGB"):
            check_image(broken, WHERE)
    with pytest.raises(InvalidRequestError, match="above the bound"):
        check_image(Image.new("1", (MAX_PIXELS, 2)), WHERE)
