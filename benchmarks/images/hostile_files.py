"""200 hostile image files: bombs, cut and damaged files, odd modes, other formats, polyglots.

The same files are made at every call. Used by `hostile` and by tests.
"""

import random
import struct
import zlib
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
NUM_FILES = 200

File = tuple[str, bytes]
"""A name, and the bytes."""


def hostile_files() -> list[File]:
    """All files, with different names."""
    made = [file for group in GROUPS for file in group()]
    made += _flipped(NUM_FILES - len(made))
    assert len(made) == NUM_FILES == len(dict(made)), f"{len(made)} files, {len(dict(made))} names"
    return made


def picture(width: int = 60, height: int = 40, seed: int = 0) -> Image.Image:
    """A picture of random colours."""
    numbers = np.random.default_rng(seed)
    return Image.fromarray(numbers.integers(0, 256, (height, width, 3), dtype=np.uint8))


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of a picture's file."""
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(*chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG file of these chunks, with right checksums."""
    parts = [b"\x89PNG\r\n\x1a\n"]
    for name, content in chunks:
        crc = struct.pack(">I", zlib.crc32(name + content))
        parts.append(struct.pack(">I", len(content)) + name + content + crc)
    return b"".join(parts)


def head(width: int, height: int, depth: int = 8, kind: int = 0) -> tuple[bytes, bytes]:
    """The first chunk of a PNG file. kind: 0 grey, 2 RGB, 3 palette, 6 RGBA."""
    return b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)


END = (b"IEND", b"")


def bombs() -> Iterator[File]:
    """Small files of large pictures, and of sizes that no picture has."""
    zeros = zlib.compress(bytes(64 << 20), 9)
    sizes = [(30000, 1), (1, 30000), (30000, 30000), (65535, 65535), (2**31 - 1, 2**31 - 1)]
    sizes += [(5793, 5793), (5792, 5792), (2**31 - 1, 1), (0, 9), (9, 0), (1, 1)]
    for width, height in sizes:
        data = zlib.compress(bytes((width + 1) * height)) if width * height < 1e8 else zeros
        yield f"png {width} x {height}", png(head(width, height), (b"IDAT", data), END)
    yield "png data of 64 MiB for 9 x 9", png(head(9, 9), (b"IDAT", zeros), END)
    yield "webp canvas", b"RIFF\x40\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + b"\xff" * 6 + bytes(40)
    lossless = bytearray(saved(picture(), "WEBP", lossless=True))
    lossless[21:25] = b"\xff\xff\xff\x0f"
    yield "webp of 16384 x 16384", bytes(lossless)
    wide = bytearray(saved(picture(), "BMP"))
    wide[18:26] = struct.pack("<ii", 60000, 60000)
    yield "bmp of 60000 x 60000", bytes(wide)
    wide[18:26] = struct.pack("<ii", -5, -(2**31))
    yield "bmp of negative sizes", bytes(wide)
    large = bytearray(saved(picture(), "JPEG"))
    at = large.index(b"\xff\xc0") + 5
    large[at : at + 4] = b"\xff\xdc\xff\xdc"
    yield "jpeg of 65500 x 65500", bytes(large)
    large[at : at + 4] = bytes(4)
    yield "jpeg of 0 x 0", bytes(large)
    noise = Image.effect_noise((5790, 5790), 50)
    yield "picture of 33 million pixels", saved(noise, "PNG", compress_level=1)
    yield "wide picture", saved(Image.new("RGB", (30000, 3)))


def modes() -> Iterator[File]:
    """Colours and depths that few pictures have."""
    for mode in ("1", "L", "LA", "P", "RGBA", "I;16"):
        image = picture().convert("L").convert("I").convert(mode) if mode == "I;16" else None
        yield f"png of mode {mode}", saved(image or picture().convert(mode))
    for mode in ("CMYK", "L", "YCbCr"):
        yield f"jpeg of mode {mode}", saved(picture().convert(mode), "JPEG")
    wide = np.random.default_rng(1).integers(0, 65536, (20, 20, 3)).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in wide)
    data = (b"IDAT", zlib.compress(rows))
    yield "png of 16-bit colours", png(head(20, 20, 16, 2), data, END)
    yield "png without a palette", png(head(20, 20, 8, 3), data, END)
    yield "png of depth 3", png(head(20, 20, 3, 0), data, END)
    yield "png of kind 7", png(head(20, 20, 8, 7), data, END)
    yield "transparent palette", saved(picture().convert("P"), transparency=bytes(range(256)))
    progressive = saved(picture(), "JPEG", progressive=True)
    yield "progressive jpeg", progressive
    last_scan = progressive[progressive.rindex(b"\xff\xda") : -2]
    yield "jpeg of 9,999 scans", progressive[:-2] + last_scan * 9999 + progressive[-2:]
    yield "animated webp", saved(picture(), "WEBP", save_all=True, append_images=[picture(seed=1)])
    yield "run-length bmp", saved(picture().convert("P"), "BMP")[:54] + bytes(2000)


def other_formats() -> Iterator[File]:
    """Files that are no images of the formats that are read."""
    yield "svg named png", b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///"/></svg>'
    yield "svg behind xml", b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b "c">]><svg>&b;</svg>'
    yield "eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 99999 99999\n(/etc/passwd) run\n"
    yield "pdf", b"%PDF-1.7\n1 0 obj<</Type/Catalog>>endobj\n"
    for kind in ("TIFF", "ICO", "PPM", "TGA", "PCX", "DDS", "SGI", "JPEG2000", "PDF", "XBM"):
        image = picture().convert("1") if kind == "XBM" else picture()
        try:
            yield f"a file of {kind}", saved(image, kind)
        except (OSError, KeyError):  # this Pillow can't write it
            yield f"a file of {kind}", kind.encode()
    yield "html", b"<html><img src=x onerror=alert(1)></html>"
    yield "zip", b"PK\x03\x04" + bytes(60)
    yield "program", b"\x7fELF" + bytes(200)
    yield "pickle", b"\x80\x04cposix\nsystem\n(S'true'\ntR."
    yield "mp4", b"\0\0\0\x18ftypmp42" + bytes(100)
    yield "empty", b""
    yield "one byte", b"\x89"
    yield "zeros", bytes(1 << 20)
    yield "random bytes", random.Random(0).randbytes(1 << 20)


def polyglots() -> Iterator[File]:
    """Images that are files of another format, too."""
    for kind in FORMATS:
        yield f"{kind} with a zip behind it", saved(picture(), kind) + b"PK\x03\x04" + bytes(99)
        yield f"{kind} with html behind it", saved(picture(), kind) + b"<script>alert(1)</script>"
    yield "GIF that is JavaScript", b"GIF89a/*" + saved(picture(), "GIF")[8:] + b"*/=1;alert(1)"
    text = saved(picture(), "JPEG", comment=b"<?php system($_GET[0]); ?>")
    yield "jpeg with a program as its comment", text
    yield "svg behind a png signature", b"\x89PNG\r\n\x1a\n<svg/>"


def exif() -> Iterator[File]:
    """Damaged EXIF data, and EXIF data whose tables name themselves."""

    def tagged(*entries: bytes, next_ifd: int = 0) -> bytes:
        count = struct.pack("<H", len(entries))
        return b"Exif\0\0II*\0\x08\0\0\0" + count + b"".join(entries) + struct.pack("<I", next_ifd)

    def entry(tag: int, kind: int, count: int, value: int) -> bytes:
        return struct.pack("<HHII", tag, kind, count, value)

    datas = {
        "exif that names itself as the next": tagged(entry(0x112, 3, 1, 6), next_ifd=8),
        "exif whose inner table is itself": tagged(entry(0x8769, 4, 1, 8), entry(0x8825, 4, 1, 8)),
        "exif with four billion values": tagged(entry(0x112, 3, 0xFFFFFFFF, 8)),
        "exif beyond the file": tagged(entry(0x112, 3, 9, 0xFFFFFFF0)),
        "exif of an unknown type": tagged(entry(0x112, 99, 1, 6)),
        "exif with 60000 entries": b"Exif\0\0II*\0\x08\0\0\0\x60\xea" + bytes(60000),
        "exif cut": b"Exif\0\0II*\0",
    }
    datas |= {f"orientation {turn}": tagged(entry(0x112, 3, 1, turn)) for turn in (0, 6, 9, 65535)}
    for name, data in datas.items():
        yield name, saved(picture(), "JPEG", exif=data)


def chunks() -> Iterator[File]:
    """PNG files with odd chunks, some of which are bombs."""
    data = (b"IDAT", zlib.compress(bytes(21 * 20)))
    bomb = zlib.compress(bytes(100 << 20), 9)
    size = head(20, 20)
    yield "compressed text of 100 MiB", png(size, (b"zTXt", b"a\0\0" + bomb), data, END)
    yield "text in Unicode of 100 MiB", png(size, (b"iTXt", b"a\0\1\0\0\0" + bomb), data, END)
    yield "colour profile of 100 MiB", png(size, (b"iCCP", b"a\0\0" + bomb), data, END)
    yield "20000 texts", png(size, *[(b"tEXt", b"a\0b")] * 20000, data, END)
    yield "20000 pieces of data", png(size, *[(b"IDAT", b"")] * 20000, data, END)
    yield "two heads", png(size, head(30000, 30000), data, END)
    yield "no head", png(data, END)
    yield "no data", png(size, END)
    yield "no end", png(size, data)
    yield "a million frames", png(size, (b"acTL", struct.pack(">II", 10**6, 0)), data, END)
    yield "no frames", png(size, (b"acTL", bytes(8)), data, END)
    yield "a chunk of 2 GiB", png(size, data)[:-4] + b"\x7f\xff\xff\xffIDAT"
    yield "exif chunk of zeros", png(size, (b"eXIf", bytes(99)), data, END)
    yield "wrong checksum", png(size, data, END)[:-4] + bytes(4)


def gifs() -> Iterator[File]:
    """Odd animations."""
    frames = [picture(8, 8, seed).quantize(4) for seed in range(2)]
    whole = saved(frames[0], "GIF", save_all=True, append_images=frames[1:] * 500, loop=0)
    yield "gif of 501 frames", whole
    outside = bytearray(saved(picture(), "GIF"))
    at = outside.index(b",")
    outside[at + 1 : at + 9] = b"\xff" * 8
    yield "gif with a frame outside of it", bytes(outside)
    yield "gif of 65535 x 65535", b"GIF89a\xff\xff\xff\xff" + saved(picture(), "GIF")[10:]
    start = b"GIF89a" + struct.pack("<HH", 8, 8) + b"\x80\0\0" + bytes(6)
    frame, large = (
        b"," + struct.pack("<HHHHB", 0, 0, side, side, 0) + b"\x02\x02\x4c\x01\0"
        for side in (8, 26000)
    )
    yield "gif whose only frame enlarges its canvas", start + large + b";"
    yield "gif whose last frame enlarges its canvas", start + frame + large + b";"
    yield "gif of garbage", b"GIF89a" + random.Random(1).randbytes(5000)
    yield "gif without frames", b"GIF89a\x08\0\x08\0\0\0\0;"
    yield "gif of comments", b"GIF89a\x08\0\x08\0\0\0\0" + b"!\xfe\x01a\0" * 20000 + b";"


def cut() -> Iterator[File]:
    """Files without their end."""
    for kind in FORMATS:
        whole = saved(picture(), kind)
        for share in (2, 10, 30, 50, 80, 99):
            yield f"{kind} cut at {share}%", whole[: len(whole) * share // 100]


def _flipped(count: int) -> Iterator[File]:
    numbers = random.Random(2)
    for at in range(count):
        kind = FORMATS[at % len(FORMATS)]
        data = bytearray(saved(picture(), kind))
        for _ in range(1 + at % 20):
            data[numbers.randrange(len(data) if at % 2 else 64)] = numbers.randrange(256)
        yield f"{kind} with damage {at}", bytes(data)


GROUPS = (bombs, modes, other_formats, polyglots, exif, chunks, gifs, cut)
"""Functions that make the files, but those with random damage."""
