"""Reads the bytes of images from data: URLs, and from hosts and files that are allowed."""

import binascii
import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from quire.errors import shown
from quire.images.decode import MAX_FILE_BYTES
from quire.images.https_fetch import HttpsFetcher
from quire.images.image_options import ImageOptions
from quire.images.wrong_media import wrong_media

_MAX_HEAD = 200
"""Maximum number of characters of a data: URL before its comma."""

_PIECE = 1 << 20
"""Characters of base64 that are decoded at once; a multiple of 4."""

_ADVICE = "send the image as a data: URL"


class ImageSources:
    """Reads images by their URLs. Threads may share an object of this class."""

    def __init__(self, options: ImageOptions, fetcher: HttpsFetcher | None = None) -> None:
        """fetcher: for tests; None fetches from options.allowed_media_domains."""
        self._fetcher = fetcher or HttpsFetcher(options.allowed_media_domains)
        self._fetches = bool(options.allowed_media_domains)
        folder = options.allowed_local_media_path
        self._folder = Path(folder).resolve() if folder else None

    def read(self, url: str, where: str) -> bytes:
        """The bytes of an image. where: names the image in errors. Raises InvalidRequestError."""
        if url[:5].lower() == "data:":
            return _read_data(url, where)
        scheme = url[:20].partition(":")[0].lower()
        if scheme == "https" and self._fetches:
            return self._fetcher.fetch(url, where, MAX_FILE_BYTES)
        if scheme == "file" and self._folder is not None:
            return _read_file(url, self._folder, where)
        if scheme in ("https", "file", "http"):
            taken = "https" if scheme == "http" and self._fetches else "data"
            raise wrong_media(
                where, f"has a URL of the scheme {scheme}, which is not allowed here; use {taken}:"
            )
        raise wrong_media(where, f"is {shown(url)}, which is no URL of an image; {_ADVICE}")


def is_remote(url: str) -> bool:
    """Whether reading the URL waits for another machine."""
    return url[:6].lower() == "https:"


def _read_data(url: str, where: str) -> bytes:
    """The bytes in a data: URL (RFC 2397) in base64."""
    head, comma, _ = url[5 : _MAX_HEAD + 5].partition(",")
    if not comma:
        raise wrong_media(
            where, f"is a data: URL without a comma in its first {_MAX_HEAD} characters"
        )
    kind, *others = head.split(";")
    # Videos pass this check, since the error of the decoder lists the formats that it reads.
    if kind and not kind.strip().lower().startswith(("image/", "video/")):
        raise wrong_media(where, f"is a data: URL of the type {shown(kind)}, but must be an image")
    if not others or others[-1].strip().lower() != "base64":
        raise wrong_media(where, "is a data: URL without base64; encode the image as base64")
    return decode_base64(url[5 + len(head) + 1 :], where)


def decode_base64(data: str, where: str) -> bytes:
    """The bytes of an image in base64. Raises InvalidRequestError."""
    if len(data) // 4 * 3 > MAX_FILE_BYTES + 3:
        raise wrong_media(where, f"has more than {MAX_FILE_BYTES} bytes")
    if "%" in data:
        data = unquote(data)
    if any(space in data for space in " \t\r\n"):
        data = "".join(data.split())
    end = max(0, len(data) - 4)
    try:
        if "=" in data[:end]:
            raise ValueError("there is padding before the end")
        # In pieces, since decoding holds the GIL, and other threads must not wait for all of it.
        pieces = (data[at : at + _PIECE] for at in range(0, len(data), _PIECE))
        return b"".join(binascii.a2b_base64(piece, strict_mode=True) for piece in pieces)
    except (binascii.Error, ValueError):
        raise wrong_media(where, "is not valid base64") from None


def _read_file(url: str, folder: Path, where: str) -> bytes:
    """The bytes of a file below a folder.

    The error is the same for a missing file and a file outside of the folder, so that clients
    don't learn which files exist.
    """
    missing = wrong_media(
        where, "is not a file in the folder from which this server may read images"
    )
    try:
        parts = urlsplit(url)
        path = Path(unquote(parts.path, errors="strict")).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):  # a loop of links, or a null character
        raise missing from None
    if parts.netloc not in ("", "localhost") or not path.is_relative_to(folder):
        raise missing
    try:
        # O_NOFOLLOW refuses a link that has replaced the file since the path was resolved. Without
        # O_NONBLOCK, opening a pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        raise missing from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise missing
    with open(descriptor, "rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise wrong_media(where, f"has more than {MAX_FILE_BYTES} bytes")
    return data
