"""NVFP4 weights, and the layout in which NVIDIA's ModelOpt stores them.

    X.weight          [O, I / 2] uint8: two e2m1 codes a byte, the lower bits first
    X.weight_scale    [O, I / 16] float8_e4m3fn: a scale for each 16 inputs
    X.weight_scale_2  [] or [1] fp32: the factor of all scales

compressed-tensors has the same numbers under other names, and the factor's reciprocal
(`compressed_tensors`). The values of codes (`mxfp4.TABLE`) are doubled so that they are integers,
and the factor is halved. Scales of activations are left out: activations are not rounded to four
bits. Source: modelopt/torch/quantization/qtensor/nvfp4_tensor.py in the package nvidia-modelopt.

Shapes: O outputs, I inputs, R rows (outputs).
"""

from functools import cached_property

import torch

from quire.errors import CheckpointError
from quire.formats.block_quantized.weights import BlockFormat, UnpackedRows, unpack_inputs
from quire.hub.model_files import shown_name
from quire.models.checkpoints.quantized.mxfp4 import TABLE
from quire.models.checkpoints.quantized.quantized_files import FoundWeights
from quire.models.checkpoints.quantized.settings import SettingFields
from quire.models.checkpoints.quantized.stored_weight import StoredWeight, Tensors
from quire.models.checkpoints.safetensors_files import SafetensorsFiles

NAME = "NVIDIA ModelOpt"
GROUP = 16
KEEPS_INPUTS = (
    "activations are not rounded to NVFP4 (W4A4), as its settings say: its weights are kept, and"
    " activations are those of other weights of four bits (W4A16)"
)

_OTHER_PARTS = ("weight_scale", "weight_scale_2", "input_scale")
_OF_CACHE = ("k_scale", "v_scale")
_LARGEST_SCALE = 0x7E
"""The code of the largest positive number of e4m3; the next is NaN, and then come negative ones."""


class ModelOptSettings:
    """The settings of ModelOpt. Only NVFP4 is read."""

    def __init__(self, fields: SettingFields) -> None:
        """Raises UnsupportedModelError for another algorithm and for unknown settings."""
        fields.one_of("quant_algo", ("NVFP4",))
        fields.one_of("group_size", (GROUP,), GROUP)
        #: See `Quantized`.
        self.remarks = [KEEPS_INPUTS]
        if fields.value("kv_cache_scheme") or fields.value("kv_cache_quant_algo"):
            self.remarks.append(
                "its scales of keys and values are left out: --kv-cache-dtype says how quire stores"
                " these, and rounds without stored scales"
            )
        fields.ignore("config_groups", "ignore", "exclude_modules", "producer", "quant_method")
        fields.finish()


def find_weights(files: SafetensorsFiles, settings: ModelOptSettings) -> FoundWeights:
    """The quantized weights in `files`. Raises CheckpointError for tensors that don't match."""
    found = FoundWeights()
    for name in files.names:
        module, _, part = name.rpartition(".")
        if part in _OF_CACHE:
            found.others.add(name)
        if part != "weight" or files.stored_dtype(name) != torch.uint8:
            continue
        tensors = Tensors(files, module)
        found.weights[name] = {name: NVFP4Weight(tensors, "weight", "weight_scale_2")}
        found.others |= {tensors.name(each) for each in _OTHER_PARTS}
    return found


class NVFP4Weight(StoredWeight):
    """A weight of e2m1 codes in groups of 16, with e4m3 scales and a factor for all of them."""

    kind = "NVFP4"
    block_format = BlockFormat(kind, 4, GROUP, table=TABLE, scale_dtype=torch.float8_e4m3fn)

    def __init__(
        self, tensors: Tensors, codes: str, factor: str, *, is_reciprocal: bool = False
    ) -> None:
        """`codes` and `factor` are the suffixes of the tensors' names. `is_reciprocal` says that
        scales are divided by the factor. Raises CheckpointError for tensors that don't match."""
        self._tensors, self._codes, self._factor_name = tensors, codes, factor
        self._is_reciprocal = is_reciprocal
        num_outputs, num_bytes = tensors.shape(codes, (torch.uint8,), 2)
        self.shape = (num_outputs, num_bytes * 2)
        groups = -(-self.shape[1] // GROUP)
        tensors.check("weight_scale", (torch.float8_e4m3fn,), [num_outputs, groups])
        tensors.check(factor, (torch.float32,), [1], [])
        if self.shape[1] % GROUP:
            raise CheckpointError(
                f"the weights' tensor {shown_name(tensors.name(codes))} has {self.shape[1]} inputs,"
                f" which is no multiple of {GROUP}; fetch it again"
            )

    @cached_property
    def _factor(self) -> torch.Tensor:
        """The factor of the doubled table's values, fp32, [1, 1, 1]."""
        stored = self._tensors.copy(self._factor_name).view(1, 1, 1)
        factor = (1 / stored if self._is_reciprocal else stored) / 2
        if not (0 < float(factor) < torch.inf):
            name = shown_name(self._tensors.name(self._factor_name))
            raise CheckpointError(
                f"the weights' tensor {name} is {float(stored)}, but must be a positive number;"
                " fetch it again"
            )
        return factor

    def codes(self, span: range) -> UnpackedRows:
        with self._tensors.rows(self._codes, span) as packed:
            codes = unpack_inputs(packed, 4)
        scales = self._tensors.copy_rows("weight_scale", span)
        if int(scales.view(torch.uint8).max()) > _LARGEST_SCALE:
            raise CheckpointError(
                f"the weights' tensor {shown_name(self._tensors.name('weight_scale'))} has scales"
                " that are negative or no numbers; fetch it again"
            )
        factors = self._factor.expand(len(span), 1, 1).contiguous()
        return UnpackedRows(self.block_format, codes, scales, factors=factors)

    def numbers(self, span: range) -> torch.Tensor:
        return self.codes(span).numbers()
