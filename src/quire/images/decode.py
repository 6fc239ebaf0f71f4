"""Decodes the bytes of an image file to RGB pixels, within bounds on its size.

Only the formats in FORMATS are decoded, whatever the file calls itself. Pillow is imported by the
first call, so that a server for text never loads it.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any

from quire.errors import InvalidRequestError
from quire.images.wrong_media import wrong_media

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")

MAX_PIXELS = 1 << 25
"""Pixels of one image, which are 96 MiB in RGB; a picture of 8K has 33.2 million."""

MAX_FILE_BYTES = 32 << 20
"""Bytes of one image file."""

_STRIP_PIXELS = 1 << 18
"""Pixels that are put over white at once, in about 2 ms."""

MAX_SCANS = 64
"""Scans of a JPEG file. Encoders write at most about 15. Each takes the time to go over the whole
picture, and only about 50 bytes of the file."""

_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd7\xff]")
"""A marker of JPEG that begins a segment or ends the file (ITU-T T.81, table B.1)."""
_END_OF_IMAGE, _START_OF_SCAN = 0xD9, 0xDA

_ORIENTATION = 0x0112
"""The tag of EXIF that says how to turn the stored picture (EXIF 2.32, section 4.6.4)."""


def decode_image(data: bytes, where: str) -> "Image":
    """The first frame of an image file as an upright RGB picture; transparent parts become white.

    where: names the image in errors. Raises InvalidRequestError for a file that is too large, is
    of another format, or is broken.
    """
    with opened_image(data, where, FORMATS) as opened:
        # Pillow decodes only the first frame of an animation.
        opened.load()
        return to_rgb(_upright(opened))


@contextmanager
def opened_image(
    data: bytes, where: str, formats: tuple[str, ...], advice: str = ""
) -> "Iterator[Image]":
    """A file of one of the formats, to be decoded within the block. Pillow's errors there become
    InvalidRequestError. advice: what to send instead of other formats."""
    from PIL import Image, UnidentifiedImageError  # a server for text never loads it

    # First, refuse what is too large before any pixel is decoded.
    if len(data) > MAX_FILE_BYTES:
        raise wrong_media(where, f"has {len(data)} bytes, above the bound of {MAX_FILE_BYTES}")
    _check_size(_webp_size(data), where)
    if _has_many_scans(data):
        raise wrong_media(where, f"is a JPEG file of more than {MAX_SCANS} scans; save it anew")
    failure: Exception
    # Pillow warns of odd but readable files, which a client must not write into the log.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    try:
        opened = _open(data, formats)
        _check_size(opened.size, where)
        # Then decode it.
        yield opened
        return
    except InvalidRequestError:
        raise
    except UnidentifiedImageError:
        also = f"; {advice}" if advice else ""
        failure = wrong_media(where, f"is no image of the formats {', '.join(formats)}{also}")
    except Exception as error:  # a hostile file makes Pillow raise errors of many classes
        if isinstance(error, Image.DecompressionBombError):
            failure = wrong_media(where, f"has too many pixels; the bound is {MAX_PIXELS}")
        else:
            reason = " ".join(str(error).split()) or type(error).__name__
            failure = wrong_media(where, f"can't be decoded ({reason:.100})")
    raise failure


def _open(data: bytes, formats: tuple[str, ...]) -> "Image":
    """The file, whose pixels are not decoded yet. Raises Pillow's errors."""
    from PIL import Image, UnidentifiedImageError  # a server for text never loads it

    if "GIF" not in formats or not data.startswith((b"GIF87a", b"GIF89a")):
        return Image.open(BytesIO(data), formats=formats)
    from quire.images.gif_file import BoundedGif  # brings Pillow

    try:
        return BoundedGif(BytesIO(data), MAX_PIXELS)
    except SyntaxError:
        raise UnidentifiedImageError from None


def check_image(image: Any, where: str) -> "Image":
    """A picture that a caller of the offline API gives, as an upright RGB picture.

    image: a PIL image, or an array of uint8 with the shape [height, width] or
    [height, width, 1, 3 or 4]. Raises InvalidRequestError.
    """
    import numpy as np  # a server for text never loads these
    from PIL import Image

    if isinstance(image, np.ndarray):
        is_picture = image.ndim == 2 or (image.ndim == 3 and image.shape[2] in (1, 3, 4))
        if image.dtype != np.uint8 or not is_picture or not image.size:
            raise wrong_media(
                where,
                f"is an array of {image.dtype} with the shape {list(image.shape)}, but must be"
                " uint8 with [height, width] or [height, width, channels]",
            )
        image = Image.fromarray(image[:, :, 0] if image.shape[2:] == (1,) else image)
    if not isinstance(image, Image.Image):
        raise wrong_media(
            where, f"has the type {type(image).__name__}, but must be a URL or a picture"
        )
    _check_size(image.size, where)
    try:
        image.load()  # since a file may only have been opened
        return to_rgb(_upright(image))
    except (OSError, SyntaxError, ValueError) as error:
        raise wrong_media(where, f"can't be read as RGB ({error!s:.100})") from None


def to_rgb(image: "Image") -> "Image":
    """The picture in RGB, over white where it is transparent, as in transformers.

    Grey values of 16 bits keep their upper 8 bits; Pillow would cut them off at 255.
    """
    from PIL import Image  # a server for text never loads it

    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):
        import numpy as np  # as above

        return Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8)).convert(
            "RGB"
        )
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        return _over_white(image.convert("RGBA"))
    return image.convert("RGB")


def _over_white(image: "Image") -> "Image":
    """An RGBA picture over white. It is computed in strips: Pillow holds the GIL during each, and
    the server's other threads must not wait for a whole picture."""
    from PIL import Image  # a server for text never loads it

    width, height = image.size
    found = Image.new("RGB", image.size)
    num_rows = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, num_rows):
        strip = image.crop((0, top, width, min(height, top + num_rows)))
        white = Image.new("RGBA", strip.size, (255, 255, 255, 255))
        found.paste(Image.alpha_composite(white, strip).convert("RGB"), (0, top))
    return found


def _upright(image: "Image") -> "Image":
    """The picture, turned as its EXIF data says; broken EXIF data is ignored."""
    from PIL.Image import Transpose  # a server for text never loads it

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    try:
        turn = turns.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # the picture itself may be fine
        return image
    if turn is None:
        return image
    turned = image.transpose(turn)
    turned.info = {name: image.info[name] for name in ("transparency",) if name in image.info}
    return turned


def _webp_size(data: bytes) -> tuple[int, int]:
    """Width and height of a WebP file with a canvas; (1, 1) for other files.

    Pillow allocates the whole canvas when it opens the file, so this is read before. Files without
    a canvas (VP8X chunk) hold one frame, which Pillow allocates later or whose size has at most 14
    bits for each side. Source: the WebP container specification, "Extended File Format".
    """
    if data[:4] != b"RIFF" or data[8:16] != b"WEBPVP8X" or len(data) < 30:
        return 1, 1
    width, height = (1 + int.from_bytes(data[at : at + 3], "little") for at in (24, 27))
    return width, height


def _has_many_scans(data: bytes) -> bool:
    """Whether a JPEG file has more scans than MAX_SCANS; False for other files.

    Only segments of the picture itself count, not those of thumbnails inside of a segment, nor
    what follows its end. Source: ITU-T T.81, section B.1.1.
    """
    if data[:2] != b"\xff\xd8":
        return False
    num_scans, at = 0, 2
    while num_scans <= MAX_SCANS and (marker := _MARKER.search(data, at)) is not None:
        kind, at = data[marker.end() - 1], marker.end()
        if kind == _END_OF_IMAGE:
            break
        num_scans += kind == _START_OF_SCAN
        at += int.from_bytes(data[at : at + 2], "big")
    return num_scans > MAX_SCANS


def _check_size(size: tuple[int, int], where: str) -> None:
    width, height = size
    if width * height > MAX_PIXELS:
        raise wrong_media(
            where,
            f"has {width} x {height} pixels, above the bound of {MAX_PIXELS}; make it smaller",
        )
    if width < 1 or height < 1:
        raise wrong_media(where, "has no pixels")
