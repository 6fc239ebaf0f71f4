"""Reads and checks the header of a safetensors file.

    8 bytes: N | N bytes of JSON: name -> {dtype, shape, data_offsets} | the tensors' bytes

Checks the format's rules (https://github.com/huggingface/safetensors): after the header, the
tensors fill the file without gaps or overlaps, and the size of each matches its shape. Imports no
torch. Called by `weight_check` and by the reader of checkpoints.
"""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from quire.errors import CheckpointError, shown
from quire.hub.model_files import foreign_content, parse_json_object, shown_name

MAX_HEADER_BYTES = 16 << 20
"""Maximum number of bytes of a header: enough for 120,000 tensors. The largest published files have
20,000. Parsing takes ten times as much memory."""

MAX_DIMENSIONS = 8
MAX_TENSOR_BYTES = 1 << 50

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip
"""Maps all dtypes of the format to their number of bits."""

_LENGTH_BYTES = 8
_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file."""

    #: A key of DTYPE_BITS.
    dtype: str
    shape: tuple[int, ...]
    #: Offset of the tensor's first byte from the beginning of the file.
    start: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors by name, in the file's order.

    Raises CheckpointError for a file that breaks a rule of the format, and OSError.
    """
    if path.exists() and not path.is_file():  # opening a pipe may block forever
        raise _broken(path, "it is not a file")
    with path.open("rb") as file:
        start = file.read(_LENGTH_BYTES)
        num_bytes = int.from_bytes(start, "little")
        other = foreign_content(start + file.read(64))
        if other is not None:
            raise CheckpointError(f"{path} is {other}")
        file_size = file.seek(0, 2)
        _check_length(path, num_bytes, file_size)
        file.seek(_LENGTH_BYTES)
        content = file.read(num_bytes)
    entries = parse_json_object(content, f"{path} is not a whole safetensors file: its header")
    entries.pop("__metadata__", None)
    first = _LENGTH_BYTES + num_bytes
    tensors: dict[str, StoredTensor] = {}
    end = first
    for name, entry in sorted(entries.items(), key=lambda item: _offsets(path, *item)):
        begin, end_of_this = _offsets(path, name, entry)
        if first + begin != end:
            raise _broken(
                path,
                f"the bytes of {shown_name(name)} begin at {begin}, but those before end at "
                f"{end - first}",
            )
        end = first + end_of_this
        tensors[name] = StoredTensor(*_dtype_and_shape(path, name, entry), first + begin)
    if end != file_size:
        raise _broken(path, f"it has {file_size} bytes, but its header describes {end}")
    return tensors


def _check_length(path: Path, num_bytes: int, file_size: int) -> None:
    if file_size < _LENGTH_BYTES:
        raise _broken(path, f"it has {file_size} bytes, fewer than a header")
    if num_bytes > MAX_HEADER_BYTES:
        raise _broken(
            path,
            f"its header would have {num_bytes} bytes, but at most {MAX_HEADER_BYTES} are read",
        )
    if _LENGTH_BYTES + num_bytes > file_size:
        raise _broken(
            path,
            f"it has {file_size} bytes, but its header alone has {_LENGTH_BYTES + num_bytes}",
        )


def _offsets(path: Path, name: str, entry: Any) -> tuple[int, int]:
    """Begin and end of a tensor, in bytes after the header."""
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise _broken(
            path,
            f"the header says {shown(entry)} of {shown_name(name)}, but must say dtype, shape and "
            "data_offsets",
        )
    offsets = entry["data_offsets"]
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _broken(path, f"the data_offsets of {shown_name(name)} are {shown(offsets)}")
    return offsets[0], offsets[1]


def _dtype_and_shape(path: Path, name: str, entry: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    dtype, shape = entry["dtype"], entry["shape"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _broken(path, f"the dtype of {shown_name(name)} is {shown(dtype)}")
    if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise _broken(path, f"the shape of {shown_name(name)} is {shown(shape)}")
    num_bits = prod(shape) * DTYPE_BITS[dtype]
    begin, end = entry["data_offsets"]
    if num_bits != 8 * (end - begin):
        raise _broken(
            path,
            f"{shown_name(name)} of dtype {dtype} and shape {shown(shape)} would have "
            f"{shown(-(-num_bits // 8))} bytes, but {end - begin} are there",
        )
    return dtype, tuple(shape)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value <= MAX_TENSOR_BYTES for value in values
    )


def _broken(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a whole safetensors file: {reason}; fetch it again")
