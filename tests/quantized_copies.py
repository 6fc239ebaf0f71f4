"""Copies of a model whose weights are rounded to the nearest anew, in other tools' formats."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tests.gguf_encoders import encode
from tests.gguf_writer import TYPE_IDS, tensor_info, text
from tests.models.checkpoints.quantized.test_awq import awq
from tests.models.checkpoints.quantized.test_awq import settings as awq_settings
from tests.models.checkpoints.quantized.test_compressed_tensors import mxfp4, packed
from tests.models.checkpoints.quantized.test_compressed_tensors import settings as ct_settings
from tests.models.checkpoints.quantized.test_fp8 import settings as fp8_settings
from tests.models.checkpoints.quantized.test_gptq import gptq
from tests.models.checkpoints.quantized.test_gptq import settings as gptq_settings
from tests.models.checkpoints.quantized.test_nvfp4 import MODELOPT, OF_MODELOPT
from tests.models.checkpoints.quantized.writers import (
    Writer,
    fp8,
    mixed_up,
    rewrite_folder,
)

from quire.hub.gguf.header import TensorInfo, read_gguf
from quire.hub.gguf.storage_types import STORAGE_TYPES

FALLBACKS = {
    "Q2_K": "IQ4_NL",
    "Q3_K": "IQ4_NL",
    "IQ4_XS": "IQ4_NL",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
"""What llama.cpp takes for rows that are no multiple of 256 numbers."""
GGUF_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4", *FALLBACKS)


def gguf_copy(source: Path, path: Path, kind: str) -> Path:
    """The GGUF file `source` with all matrices as blocks of the type `kind`, written to `path`."""
    # Not by gguf.GGUFReader, which takes longer for the fields than the tensors take.
    file = read_gguf(source)
    alignment = int(str(file.metadata.get("general.alignment", 32)))
    kinds = {name: _kind_of(info, kind) for name, info in file.tensors.items()}
    infos, size = [], 0
    for name, info in file.tensors.items():
        number = TYPE_IDS[kinds[name]]
        infos.append(tensor_info(name, info.shape[::-1], number, size))
        storage = STORAGE_TYPES[number]
        num_bytes = math.prod(info.shape) // storage.block_size * storage.block_bytes
        size += num_bytes + -num_bytes % alignment
    with path.open("wb") as target:
        # Numbers of tensors and fields, and the fields, are the source's.
        target.write(file.content[: min(file.content.find(text(name)) for name in kinds)])
        target.write(b"".join(infos))
        for name, info in file.tensors.items():
            target.write(bytes(-target.tell() % alignment))
            raw = np.frombuffer(file.content, np.uint8, info.num_bytes, info.start)
            rows = raw.reshape(-1, info.row_bytes)
            numbers = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[info.storage.name])
            target.write(encode(kinds[name], numbers).tobytes())
    return path


def _kind_of(info: TensorInfo, kind: str) -> str:
    if info.storage.name == "F32":
        return "F32"
    block_size = STORAGE_TYPES[TYPE_IDS[kind]].block_size
    return FALLBACKS[kind] if info.shape[-1] % block_size else kind


_MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
FOLDERS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "AWQ, groups of 64": (awq(64), awq_settings(group_size=64)),
    "GPTQ, groups of 64": (gptq(size=64), gptq_settings(group_size=64)),
    "GPTQ, act-order": (gptq(size=64, order=mixed_up), gptq_settings(group_size=64, desc_act=True)),
    "GPTQ, 8 bits": (gptq(8, size=64), gptq_settings(bits=8, group_size=64)),
    "W4A16, groups of 64": (
        packed(4, 64),
        ct_settings("pack-quantized", {"strategy": "group", "group_size": 64}),
    ),
    "W8A16, whole rows": (packed(8, 0), ct_settings("pack-quantized", {"num_bits": 8})),
    "MXFP4A16": (mxfp4, ct_settings("mxfp4-pack-quantized", _MXFP4)),
    "NVFP4": (OF_MODELOPT, MODELOPT),
    "fp8, blocks of 64": (fp8((64, 64)), fp8_settings(weight_block_size=[64, 64])),
}
"""A name -> how linears are written, and the config's settings. Groups of 128, which are the usual
ones, don't divide SmolLM2's 576 inputs."""


def folder_copy(source: Path, folder: Path, name: str) -> Path:
    """The model folder `source` with linears as `FOLDERS[name]` has them, written to `folder`."""
    shutil.copytree(source, folder)
    writer, settings = FOLDERS[name]
    rewrite_folder(folder, {"": writer}, settings)
    return folder


def copies(smollm2: Path, smollm2_gguf: Path) -> dict[str, Callable[[Path], Path]]:
    """A name of each format -> what writes the copy to a path that doesn't exist."""

    def of_type(kind: str) -> Callable[[Path], Path]:
        return lambda path: gguf_copy(smollm2_gguf, path.with_suffix(".gguf"), kind)

    def of_folder(name: str) -> Callable[[Path], Path]:
        return lambda path: folder_copy(smollm2, path, name)

    files = {"GGUF as published": lambda _: smollm2_gguf}
    files |= {f"GGUF {kind}": of_type(kind) for kind in GGUF_TYPES}
    return files | {name: of_folder(name) for name in FOLDERS}
