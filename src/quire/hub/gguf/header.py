"""Reads and checks the header of a GGUF file, versions 2 and 3, little-endian.

    magic "GGUF" | version u32 | number of tensors u64 | number of fields u64
    fields:  name | type u32 | value
    tensors: name | number of dimensions u32 | dimensions u64, innermost first | type u32 | offset
    padding up to general.alignment | the tensors' bytes

Enforces the format's rules (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): names are
unique, and tensors begin at multiples of the alignment, lie inside the file and don't overlap.
Imports no torch. Called by the readers of weights, configs and tokenizers.
"""

import errno
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

from quire.errors import CheckpointError, shown
from quire.hub.gguf.storage_types import REMOVED_TYPES, STORAGE_TYPES, StorageType
from quire.hub.gguf.values import FieldReader, MalformedError, Value, field_name
from quire.hub.model_files import foreign_content

MAGIC = b"GGUF"
MAX_TENSORS = 1 << 17
"""Maximum number of tensors in one file. The largest published models have 2,000, with stacked
experts."""
MAX_FIELDS = 1 << 14
"""Maximum number of metadata fields in one file. Published files have fewer than 100."""
MAX_DIMENSIONS = 4
_VERSIONS = (2, 3)
_ALIGNMENT = "general.alignment"
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20
_TENSOR_BYTES = 32
"""Minimum number of bytes of a tensor's entry in the header."""
_FIELD_BYTES = 13
"""Minimum number of bytes of a metadata field in the header."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The type, shape and position of a tensor in a file."""

    storage: StorageType
    #: The outermost dimension comes first, in contrast to ggml.
    shape: tuple[int, ...]
    #: The offset of the tensor's first byte from the beginning of the file.
    start: int

    @property
    def row_bytes(self) -> int:
        """Number of bytes of one row; a row runs along the last dimension."""
        return self.shape[-1] // self.storage.block_size * self.storage.block_bytes

    @property
    def num_bytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A mapped file and its parsed header."""

    path: Path
    #: The whole file, memory-mapped: pages are read on access, and writes don't change the disk.
    content: mmap.mmap
    #: Values by field name.
    metadata: Mapping[str, Value]
    #: Tensors by name, in the order in which they are stored.
    tensors: Mapping[str, TensorInfo]


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of a file. Raises CheckpointError that names the file if it can't be read or
    breaks a rule of the format.

    The last two results (a model and its image encoder) are cached while the files are unchanged.
    Config, tokenizer and weights each call this, and reading a vocabulary of 150,000 strings takes
    0.06 s (Zen 5).
    """
    try:
        found = path.stat()
    except OSError:
        return _read(path)  # raises
    return _kept(path, found.st_ino, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=2)
def _kept(path: Path, *_identity: int) -> GGUFFile:
    return _read(path)


def _read(path: Path) -> GGUFFile:
    content = _mapped(path)
    try:
        reader = FieldReader(content)
        num_tensors, num_fields = _read_counts(path, reader, bytes(content[:64]))
        metadata = _read_metadata(reader, num_fields)
        tensors = _read_tensors(reader, num_tensors)
        tensors = _placed(tensors, reader, _alignment(metadata))
    except MalformedError as error:
        raise broken(path, str(error)) from None
    return GGUFFile(path, content, metadata, tensors)


def broken(path: Path, reason: str) -> CheckpointError:
    """The error for a broken file. `reason` is a clause that says what is wrong with it."""
    return CheckpointError(f"{path} is not a whole GGUF file: {reason}; fetch it again")


def _mapped(path: Path) -> mmap.mmap:
    if path.exists() and not path.is_file():  # opening a pipe may wait for ever
        raise broken(path, "it is not a file")
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise broken(path, "it is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist; the download is not whole: fetch it again"
        ) from None
    except OSError as error:
        if error.errno == errno.ENOMEM:  # too little address space to map it
            raise MemoryError(str(error)) from error
        raise broken(path, f"it can't be read ({error.strerror})") from error


def _read_counts(path: Path, reader: FieldReader, start: bytes) -> tuple[int, int]:
    """The numbers of tensors and of metadata fields."""
    if not start.startswith(MAGIC):
        other = foreign_content(start)
        if other is not None:
            raise CheckpointError(f"{path} is {other}")
        raise MalformedError(f"it begins with {shown(start[:4])}, not with {shown(MAGIC)}")
    reader.at = len(MAGIC)
    version = reader.number("I", "the version")
    if version and version & 0xFFFF == 0:
        raise CheckpointError(
            f"{path} is a GGUF file for big-endian machines, which quire does not read; take the"
            " little-endian one, as most are published, or convert it with llama.cpp's"
            " gguf_convert_endian.py"
        )
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{path} is a GGUF file of version {version}, but quire reads versions 2 and 3; "
            "convert the original model anew with llama.cpp's convert_hf_to_gguf.py"
        )
    num_tensors = reader.number("Q", "the number of tensors")
    num_fields = reader.number("Q", "the number of metadata fields")
    for count, least, most, what in (
        (num_tensors, _TENSOR_BYTES, MAX_TENSORS, "tensors"),
        (num_fields, _FIELD_BYTES, MAX_FIELDS, "metadata fields"),
    ):
        if count * least > reader.num_left:
            raise MalformedError(
                f"it claims {count} {what} of {least} bytes or more in {reader.num_left} bytes"
            )
        if count > most:
            raise MalformedError(f"it claims {count} {what}, but at most {most} are read")
    return num_tensors, num_fields


def _read_metadata(reader: FieldReader, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for index in range(count):
        name = reader.string(f"the name of metadata field {index}")
        if name in metadata:
            raise MalformedError(f"the metadata field {field_name(name)} occurs twice")
        metadata[name] = reader.value(f"the metadata field {field_name(name)}")
    return metadata


def _alignment(metadata: dict[str, Value]) -> int:
    alignment = metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT:
        raise MalformedError(
            f"{_ALIGNMENT} is {shown(alignment)}, not a power of two up to {_MAX_ALIGNMENT}"
        )
    if alignment & (alignment - 1):
        raise MalformedError(f"{_ALIGNMENT} is {alignment}, not a power of two")
    return alignment


def _read_tensors(reader: FieldReader, count: int) -> dict[str, TensorInfo]:
    """The tensors by name. `start` is relative to the tensor data; `_placed` makes it absolute."""
    tensors: dict[str, TensorInfo] = {}
    for index in range(count):
        name = reader.string(f"the name of tensor {index}")
        what = f"the tensor {field_name(name)}"
        if name in tensors:
            raise MalformedError(f"{what} occurs twice")
        num_dimensions = reader.number("I", f"the shape of {what}")
        if not 0 < num_dimensions <= MAX_DIMENSIONS:
            raise MalformedError(
                f"{what} has {num_dimensions} dimensions, but must have 1 to {MAX_DIMENSIONS}"
            )
        sizes = [reader.number("Q", f"the shape of {what}") for _ in range(num_dimensions)]
        kind = reader.number("I", f"the type of {what}")
        offset = reader.number("Q", f"the offset of {what}")
        tensors[name] = TensorInfo(_storage(kind, sizes, what), tuple(reversed(sizes)), offset)
    return tensors


def _storage(kind: int, sizes: list[int], what: str) -> StorageType:
    """The storage type with the id `kind`. Raises if it is unknown or doesn't fit the sizes."""
    if kind in REMOVED_TYPES:
        raise MalformedError(
            f"{what} is of type {REMOVED_TYPES[kind]}, which ggml no longer supports: take the"
            " model in another quantization"
        )
    if kind not in STORAGE_TYPES:
        raise MalformedError(f"{what} is of type {kind}, which quire does not support")
    storage = STORAGE_TYPES[kind]
    if 0 in sizes:
        raise MalformedError(f"{what} has no values: its sizes are {sizes}")
    if sizes[0] % storage.block_size:
        raise MalformedError(
            f"{what} has rows of {sizes[0]} values, but its type {storage.name} has blocks of "
            f"{storage.block_size}"
        )
    return storage


def _placed(
    tensors: dict[str, TensorInfo], reader: FieldReader, alignment: int
) -> dict[str, TensorInfo]:
    """The tensors with `start` as an offset in the file. Checks alignment, bounds and overlaps."""
    first = -(-reader.at // alignment) * alignment
    size = reader.at + reader.num_left
    placed: dict[str, TensorInfo] = {}
    end = first
    for name, info in sorted(tensors.items(), key=lambda item: item[1].start):
        start = first + info.start
        what = f"the tensor {field_name(name)}"
        if info.start % alignment:
            raise MalformedError(
                f"{what} begins at {info.start}, which is no multiple of {alignment}"
            )
        if start + info.num_bytes > size:
            raise MalformedError(
                f"{what} would end at byte {start + info.num_bytes}, but the file has {size}"
            )
        if start < end:
            raise MalformedError(f"{what} begins within the tensor before it")
        placed[name] = TensorInfo(info.storage, info.shape, start)
        end = start + info.num_bytes
    return placed
