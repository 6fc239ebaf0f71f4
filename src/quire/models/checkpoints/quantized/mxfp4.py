"""MXFP4 weights in the layout of gpt-oss's experts.

    X.gate_up_proj_blocks  [E, 2F, H / 32, 16] uint8    two codes a byte, the lower bits first;
    X.gate_up_proj_scales  [E, 2F, H / 32] uint8        rows of gate and up alternate
    X.down_proj_blocks     [E, H, F / 32, 16] uint8
    X.down_proj_scales     [E, H, F / 32] uint8         the exponent of two, plus 127

Each expert is presented as separate weights. The biases are separate tensors, which `unstacked.py`
splits. The table's values are doubled so that they are integers, and the scales are halved.
(OCP Microscaling Formats 1.0, sections 5.3.3 and 5.4.1.)

Shapes: E experts, F intermediate size, H hidden size, O outputs, I inputs, R rows.
"""

import re

import torch

from quire.errors import CheckpointError
from quire.formats.block_quantized.weights import unpack_inputs
from quire.hub.model_files import shown_name
from quire.models.checkpoints.quantized.quantized_files import FoundWeights
from quire.models.checkpoints.quantized.settings import SettingFields
from quire.models.checkpoints.quantized.stored_weight import (
    GroupedWeight,
    Tensors,
)
from quire.models.checkpoints.safetensors_files import SafetensorsFiles
from quire.models.checkpoints.source import check_num_experts

NAME = "MXFP4"
TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The values of e2m1 codes, doubled."""

_GROUP = 32
_NO_NUMBER = 255
_STACKED = re.compile(r"^(.*experts)\.(gate_up_proj|down_proj)_blocks$")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class MXFP4Settings:
    """The settings of MXFP4. None of them affects how weights are read."""

    def __init__(self, fields: SettingFields) -> None:
        """Raises UnsupportedModelError for unknown settings."""
        fields.ignore("dequantize", "modules_to_not_convert", "quant_method")
        fields.finish()


def find_weights(files: SafetensorsFiles, settings: MXFP4Settings) -> FoundWeights:
    """The quantized weights in `files`. Raises CheckpointError for tensors that don't match."""
    found = FoundWeights()
    for name in files.names:
        match = _STACKED.match(name)
        if match is None:
            continue
        module, linear = match.groups()
        tensors = Tensors(files, module)
        blocks, scales = f"{linear}_blocks", f"{linear}_scales"
        shape = tensors.shape(blocks, (torch.uint8,), 4)
        parts = _PARTS[linear]
        if shape[1] % len(parts) or shape[3] != _GROUP // 2:
            raise CheckpointError(
                f"the weights' tensor {shown_name(name)} has the shape {shape}, but must have an"
                f" even number of rows and {_GROUP // 2} bytes in a block; fetch it again"
            )
        check_num_experts(name, shape[0])
        tensors.check(scales, (torch.uint8,), shape[:3])
        found.others.add(tensors.name(scales))
        found.weights[name] = {
            f"{module}.{expert}.{part}.weight": _ExpertWeight(
                tensors, linear, expert, index, shape[1:3]
            )
            for expert in range(shape[0])
            for index, part in enumerate(parts)
        }
    return found


class MXFP4Weight(GroupedWeight):
    """A weight of e2m1 codes in groups of 32, whose scales are powers of two."""

    kind = NAME
    width = 4
    zero = 0
    table = TABLE
    scale_dtype = torch.bfloat16


def powers_of_two(stored: torch.Tensor, name: str) -> torch.Tensor:
    """The bf16 scales of `stored` uint8 exponents, halved, since the table of values is doubled.
    Raises CheckpointError for NaN."""
    if bool((stored == _NO_NUMBER).any()):
        raise CheckpointError(
            f"the weights' tensor {shown_name(name)} has scales that are no numbers; fetch it again"
        )
    stored = stored.short()
    # Normal numbers have their exponent's bits. The smallest two scales are subnormal.
    bits = torch.where(stored > 1, (stored - 1) << 7, 32 << stored.clamp(max=1))
    return bits.short().view(torch.bfloat16)


class _ExpertWeight(MXFP4Weight):
    """Part `index` (gate or up) of an expert's fused linear, in which rows of the parts alternate.
    The stored tensor has `shape` [rows, groups] for each expert."""

    def __init__(
        self, tensors: Tensors, linear: str, expert: int, index: int, shape: list[int]
    ) -> None:
        self._tensors, self._linear, self._expert, self._index = tensors, linear, expert, index
        self._count = len(_PARTS[linear])
        rows, self.num_groups = shape
        self.shape = (rows // self._count, self.num_groups * _GROUP)

    def _rows(self, kind: str, span: range) -> torch.Tensor:
        with self._tensors.rows(
            f"{self._linear}_{kind}", range(self._expert, self._expert + 1)
        ) as lent:
            part = lent[0, self._index :: self._count]
            return part[span.start : span.stop].contiguous()

    def read_codes(self, span: range) -> torch.Tensor:
        return unpack_inputs(self._rows("blocks", span).flatten(1), 4)

    def read_scales(self, span: range) -> torch.Tensor:
        name = self._tensors.name(f"{self._linear}_scales")
        return powers_of_two(self._rows("scales", span), name)
