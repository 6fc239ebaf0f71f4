"""fp8 weights (e4m3) in the layouts of DeepSeek, Qwen, Mistral and FBGEMM.

    X.weight            [O, I] float8_e4m3fn
    X.weight_scale_inv  [ceil(O / B), ceil(I / C)]    for blocks of B x C, usually 128 x 128
    X.weight_scale      [O, 1], [1] or []             for each output, or for the whole weight

A weight is its stored number times its scale, although the name says "inv". Weights stay as they
are stored where kernels have a layout for them, with scales repeated for each output of a block.
Scales of activations are ignored, since activations are not rounded. (DeepSeek-V3,
arXiv:2412.19437, section 3.3.2.)

Shapes: O outputs, I inputs, R rows (outputs), C blocks of inputs.
"""

from collections.abc import Sequence

import torch

from quire.errors import CheckpointError, shown
from quire.formats.block_quantized.weights import BlockFormat, UnpackedRows
from quire.models.checkpoints.quantized.quantized_files import FoundWeights
from quire.models.checkpoints.quantized.settings import SettingFields
from quire.models.checkpoints.quantized.stored_weight import SCALES, StoredWeight, Tensors
from quire.models.checkpoints.safetensors_files import SafetensorsFiles

NAME = "fp8"
_SCALE_NAMES = ("weight_scale_inv", "weight_scale")
_UNUSED = ("activation_scale", "input_scale", "input_scale_ub", "k_scale", "v_scale", "kv_scale")
Block = tuple[int, int]


class Fp8Settings:
    """The settings of fp8 that affect how weights are read."""

    def __init__(self, fields: SettingFields) -> None:
        """Read the settings. Raises UnsupportedModelError for unknown ones, and CheckpointError for
        malformed ones."""
        #: The size (outputs, inputs) of a block with one scale; None if scales are not by block.
        self.block = read_block(fields, "weight_block_size")
        for name in ("fmt", "weight_dtype", "activation_dtype"):
            fields.one_of(name, ("e4m3", "float8_e4m3fn", "fp8_e4m3"), "e4m3")
        fields.one_of("scale_fmt", ("float", "ue8m0"), "float")
        fields.one_of("expert_dtype", ("fp8",), "fp8")
        fields.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
        fields.one_of("kv_cache_scheme", ("static",), "static")
        fields.ignore("activation_scale_ub", "dequantize", "ignored_layers", "ignored_scheme")
        fields.ignore("modules_to_convert", "modules_to_not_convert", "quant_method")
        fields.finish()


def read_block(fields: SettingFields, name: str) -> Block | None:
    """The size (outputs, inputs) of a block; None if the field is not set. Raises CheckpointError
    if its value is not a pair of sizes."""
    value = fields.value(name)
    if isinstance(value, str):
        value = [int(each) if each.isdecimal() else each for each in value.split("x")]
    if value is None:
        return None
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 2 or not all(type(each) is int and 0 < each < 1 << 30 for each in sizes):
        raise CheckpointError(
            f"{fields.where}: {name} is {shown(value)}, but must be two numbers above 0"
        )
    return sizes[0], sizes[1]


def find_weights(files: SafetensorsFiles, settings: Fp8Settings) -> FoundWeights:
    """The quantized weights in `files`. Raises CheckpointError for tensors that don't match."""
    found = FoundWeights()
    for name in files.names:
        module, _, part = name.rpartition(".")
        if part in _UNUSED:
            found.others.add(name)
        if part in _SCALE_NAMES:
            Tensors(files, module).shape("weight", (torch.float8_e4m3fn,), 2)
        if part != "weight" or files.stored_dtype(name) != torch.float8_e4m3fn:
            continue
        tensors = Tensors(files, module)
        scale = next(filter(tensors.has, _SCALE_NAMES), _SCALE_NAMES[0])
        blocks = () if settings.block is None else (settings.block,)
        found.weights[name] = {name: Fp8Weight(tensors, scale, blocks)}
        found.others.add(tensors.name(scale))
    return found


class Fp8Weight(StoredWeight):
    """A weight of fp8 numbers. The size of its blocks, each with one scale, follows from the shape
    of its scales."""

    kind = NAME

    def __init__(self, tensors: Tensors, scale: str, blocks: Sequence[Block]) -> None:
        """`scale` is the suffix of the scales' name, such as weight_scale_inv. `blocks` are the
        block sizes that the scales may have.

        Raises CheckpointError for scales that don't fit the weight.
        """
        self._tensors, self._scale = tensors, scale
        num_outputs, num_inputs = tensors.shape("weight", (torch.float8_e4m3fn,), 2)
        self.shape = (num_outputs, num_inputs)
        # The shape of the scales shows the block: one output, the whole weight, or one of `blocks`.
        grids = {
            (-(-num_outputs // rows), -(-num_inputs // columns)): (rows, columns)
            for rows, columns in ((1, num_inputs), (num_outputs, num_inputs), *blocks)
        }
        dtypes = (*SCALES, torch.float8_e8m0fnu)
        shapes = [*map(list, grids), [num_outputs], [1], []]
        found = tensors.check(scale, dtypes, *shapes)
        grid = (found[0], found[1]) if len(found) == 2 else ((*found, 1)[0], 1)
        self._block = grids[grid]

    @property
    def block_format(self) -> BlockFormat | None:
        num_inputs, columns = self.shape[1], self._block[1]
        if num_inputs % columns or columns % 4:
            return None
        size = 0 if columns == num_inputs else columns
        return BlockFormat(self.kind, 8, size, is_float8=True, scale_dtype=torch.float32)

    def codes(self, span: range) -> UnpackedRows:
        assert self.block_format is not None
        codes = self._tensors.copy_rows("weight", span).view(torch.uint8)
        return UnpackedRows(self.block_format, codes, self._scales(span))

    def _scales(self, span: range) -> torch.Tensor:
        """The scales of some rows, [R, C] fp32."""
        scales = self._tensors.copy(self._scale).float()
        scales = scales.view(-1, scales.shape[-1] if scales.dim() == 2 else 1)
        return scales[torch.arange(span.start, span.stop) // self._block[0]]

    def numbers(self, span: range) -> torch.Tensor:
        columns, of_rows = self._block[1], self._scales(span)
        with self._tensors.rows("weight", span) as codes:
            numbers = codes.float()
        for start in range(0, self.shape[1], columns):
            block = start // columns
            numbers[:, start : start + columns] *= of_rows[:, block, None]
        return numbers
