"""Writes GGUF files for tests: whole ones, and ones that break a rule of the format on purpose."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.hub.gguf.storage_types import STORAGE_TYPES

TYPE_IDS = {storage.name: number for number, storage in STORAGE_TYPES.items()}
U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10


@dataclass(frozen=True)
class Raw:
    """A metadata value as bytes, type included; or a tensor's bytes with its type and shape."""

    content: bytes
    kind: str = ""
    shape: tuple[int, ...] = ()


def text(value: str | bytes) -> bytes:
    content = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(content)) + content


def value(given: Any) -> bytes:
    """With its type."""
    if isinstance(given, Raw):
        return given.content
    if isinstance(given, bool):
        return struct.pack("<IB", BOOL, given)
    if isinstance(given, int):
        return struct.pack("<II", U32, given) if given >= 0 else struct.pack("<Ii", I32, given)
    if isinstance(given, float):
        return struct.pack("<If", F32, given)
    if isinstance(given, str):
        return struct.pack("<I", STRING) + text(given)
    entries = [value(each) for each in given]
    kind = entries[0][:4] if entries else struct.pack("<I", I32)
    return (
        struct.pack("<I", ARRAY)
        + kind
        + struct.pack("<Q", len(entries))
        + b"".join(entry[4:] for entry in entries)
    )


def tensor_info(name: str | bytes, sizes: tuple[int, ...], kind: int, offset: int) -> bytes:
    """sizes: innermost first."""
    return (
        text(name)
        + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        + struct.pack("<IQ", kind, offset)
    )


def header(
    fields: list[bytes], infos: list[bytes], *, magic: bytes = b"GGUF", version: int = 3
) -> bytes:
    """fields: names with their values, each in one."""
    counts = struct.pack("<IQQ", version, len(infos), len(fields))
    return magic + counts + b"".join(fields) + b"".join(infos)


def as_raw(tensor: "torch.Tensor | Raw") -> Raw:
    """In the type of its own dtype."""
    if isinstance(tensor, Raw):
        return tensor
    kind = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[tensor.dtype]
    content = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return Raw(content, kind, tuple(tensor.shape))


def random_raw(kind: str, shape: tuple[int, ...], seed: int) -> Raw:
    """Blocks of a type, with scales that are numbers."""
    storage = STORAGE_TYPES[TYPE_IDS[kind]]
    rng = np.random.default_rng(seed)
    num_blocks = int(np.prod(shape)) // storage.block_size
    blocks = rng.integers(0, 256, (num_blocks, storage.block_bytes), dtype=np.uint8)
    # The places of fp16 scales and factors: small positive numbers.
    for at in SCALE_BYTES.get(kind, ()):
        blocks[:, at] = 0x1C + (blocks[:, at] & 3)
    if kind == "MXFP4":  # whose scale is the exponent of a power of two
        blocks[:, 0] = 118 + (blocks[:, 0] & 3)
    return Raw(blocks.tobytes(), kind, shape)


SCALE_BYTES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ2_S", "IQ3_S"), (1,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (1, 3)),
    "Q2_K": (81, 83),
    "Q3_K": (109,),
    "Q6_K": (209,),
}
"""Where the upper bytes of a block's fp16 scales are."""


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, "torch.Tensor | Raw"],
    *,
    alignment: int = 32,
    version: int = 3,
) -> Path:
    """Numbers of metadata become u32, i32 or f32."""
    offset, infos, data = 0, [], b""
    for name, tensor in tensors.items():
        raw = as_raw(tensor)
        infos.append(tensor_info(name, raw.shape[::-1], TYPE_IDS[raw.kind], len(data)))
        data += raw.content + bytes(-len(raw.content) % alignment)
    fields = [text(name) + value(given) for name, given in metadata.items()]
    start = header(fields, infos, version=version)
    offset = -len(start) % alignment
    path.write_bytes(start + bytes(offset) + data)
    return path
