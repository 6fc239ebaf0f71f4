"""compressed-tensors weights in the layouts of LLM Compressor.

    pack-quantized     X.weight_packed [O, ceil(I * bits / 32)] int32: codes of neighbouring inputs,
                       X.weight_shape [2]
    int-quantized      X.weight [O, I] int8
    float-quantized    X.weight [O, I] float8_e4m3fn
    mxfp4-pack-...     X.weight_packed [O, I / 2] uint8, with scales of uint8
    nvfp4-pack-...     X.weight_packed [O, I / 2] uint8, with scales of float8_e4m3fn, which are
                       divided by X.weight_global_scale [1] fp32
    all                X.weight_scale: [O, G] per group, [O, 1] per output, [1] per tensor,
                       or one per block
    asymmetric         X.weight_zero_point [ceil(O * bits / 32), G] int32, packed along the outputs,
                       or [O, G] int8
    act-order          X.weight_g_idx [I] int32: the group of each input

Codes are signed; packed codes and zeros are stored with half of their range added. The settings of
each group of linears in config.json are checked. The patterns in targets and ignore are not used,
because the files show how each linear is stored. Source: compressed_tensors/compressors in the
package compressed-tensors.

Shapes: O outputs, I inputs, R rows (outputs), G groups.
"""

from abc import abstractmethod
from collections.abc import Mapping

import torch

from quire.errors import CheckpointError, UnsupportedModelError, shown
from quire.formats.block_quantized.weights import BlockFormat, UnpackedRows, unpack_inputs
from quire.hub.model_files import shown_name
from quire.models.checkpoints.quantized.fp8 import Block, Fp8Weight, read_block
from quire.models.checkpoints.quantized.mxfp4 import MXFP4Weight, powers_of_two
from quire.models.checkpoints.quantized.nvfp4 import KEEPS_INPUTS, NVFP4Weight
from quire.models.checkpoints.quantized.quantized_files import FoundWeights
from quire.models.checkpoints.quantized.settings import ADVICE, SettingFields
from quire.models.checkpoints.quantized.stored_weight import (
    SCALES,
    GroupedWeight,
    StoredWeight,
    Tensors,
)
from quire.models.checkpoints.safetensors_files import SafetensorsFiles

NAME = "compressed-tensors"
_FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("mxfp4-pack-quantized", "nvfp4-pack-quantized", "mixed-precision"),
)
_STRATEGIES = ("tensor", "channel", "group", "block")
_PACKED_BITS = (4, 8)
_OTHER_PARTS = (
    *("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale"),
    *("input_scale", "input_zero_point", "input_global_scale"),
)
_OF_ALL: tuple[list[int], ...] = ([1], [], [1, 1])
"""Shapes of a single scale or zero for the whole weight."""
_OF_CACHE = (
    *("k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point", "q_zero_point"),
    *("output_scale", "output_zero_point"),  # for k_proj and v_proj, in files of 2024
)


class CompressedSettings:
    """The settings of compressed-tensors that affect how weights are read and multiplied."""

    def __init__(self, fields: SettingFields) -> None:
        """Read the settings. Raises UnsupportedModelError for unknown ones, and CheckpointError for
        malformed ones."""
        #: Sizes of blocks that share a scale.
        self.blocks: list[Block] = []
        #: `rounds_inputs`: whether int8 weights are multiplied by activations rounded to int8.
        #: `has_token_scales`: whether some of these activations have one scale for each token.
        self.rounds_inputs = self._keeps_inputs = self.has_token_scales = False
        #: See `Quantized`.
        self.remarks: list[str] = []
        # First, check the settings of the whole model.
        fields.one_of("format", _FORMATS)
        # Some checkpoints of 2024 say "frozen". The tensors show whether weights are compressed.
        fields.one_of("quantization_status", ("compressed", "frozen"), "compressed")
        sparsity = fields.value("sparsity_config")
        if sparsity:
            inner = SettingFields(sparsity, f"{fields.where}.sparsity_config")
            inner.one_of("format", ("dense",), "dense")
        if fields.value("kv_cache_scheme"):
            self.remarks.append(
                "its scales of keys and values (kv_cache_scheme) are left out: --kv-cache-dtype"
                " says how quire stores these, and rounds without stored scales"
            )
        # Then read the settings of each group of linears.
        groups = fields.value("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise CheckpointError(
                f"{fields.where}: config_groups is {shown(groups)}, but must say how weights are"
                " quantized"
            )
        for name, group in groups.items():
            self._read_group(SettingFields(group, f"{fields.where}.config_groups.{name}"))
        if self.rounds_inputs and self._keeps_inputs:
            self.remarks.append(
                "activations are rounded to int8 before all linears of int8 weights, also those of"
                " config_groups without input_activations"
            )
        fields.ignore("global_compression_ratio", "ignore", "provider", "quant_method", "version")
        fields.finish()

    def _read_group(self, fields: SettingFields) -> None:
        fields.one_of("format", _FORMATS, _FORMATS[0])
        fields.one_of("output_activations", (None,), False)
        weights = fields.value("weights")
        if weights is None:
            raise UnsupportedModelError(
                f"{fields.where} rounds activations but not weights, which quire does not support;"
                f" {ADVICE}"
            )
        kind, is_plain = self._read_weights(SettingFields(weights, f"{fields.where}.weights"))
        inputs = fields.value("input_activations")
        if inputs is None:
            self._keeps_inputs = self._keeps_inputs or kind == "int"
        else:
            self._read_inputs(SettingFields(inputs, f"{fields.where}.input_activations"), kind)
            self.has_token_scales = self.has_token_scales or (kind == "int" and is_plain)
        fields.ignore("targets")
        fields.finish()

    def _read_weights(self, fields: SettingFields) -> tuple[str, bool]:
        """(kind of the weights, whether they are 8-bit without groups), read from the settings."""
        kind: str = fields.one_of("type", ("int", "float"), "int")
        num_bits = fields.one_of("num_bits", (4, 8), 8)
        is_float4 = (kind, num_bits) == ("float", 4)
        strategies = (*_STRATEGIES, "tensor_group") if is_float4 else _STRATEGIES
        strategy = fields.one_of("strategy", strategies, "tensor")
        block = read_block(fields, "block_structure")
        if strategy == "block" and block is not None:
            self.blocks.append(block)
        fields.one_of("symmetric", (True, False), True)
        fields.one_of("dynamic", (False,), False)
        fields.one_of("actorder", ("group", "weight", "static", "dynamic", False, True), False)
        fields.ignore("group_size", "observer", "observer_kwargs", "scale_dtype", "zp_dtype")
        fields.finish()
        return kind, num_bits == 8 and strategy in ("tensor", "channel")

    def _read_inputs(self, fields: SettingFields, kind: str) -> None:
        """Read the settings of activations. The layout of the weights decides how activations are
        rounded; if the settings say otherwise, a remark is added."""
        bits = fields.one_of("num_bits", (4, 8), 8)
        fields.one_of("type", ("int", "float"), "int")
        self.rounds_inputs = self.rounds_inputs or kind == "int"
        strategy = fields.value("strategy")
        if strategy == "tensor_group":
            self.remarks.append(KEEPS_INPUTS)
        if kind == "int" and (bits, strategy, fields.value("dynamic")) != (8, "token", True):
            self.remarks.append(
                "activations are rounded to int8 with a scale per token or per 32 inputs, computed"
                " in each step, not as its input_activations say"
            )
        fields.ignore("symmetric", "strategy", "group_size", "block_structure", "dynamic")
        fields.ignore("actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype")
        fields.finish()


def find_weights(files: SafetensorsFiles, settings: CompressedSettings) -> FoundWeights:
    """The quantized weights in `files`. Raises CheckpointError for tensors that don't match."""
    found = FoundWeights()
    for name in files.names:
        module, _, part = name.rpartition(".")
        if part in _OF_CACHE:
            found.others.add(name)
        weight = None
        if part in ("weight", "weight_packed"):
            weight = _weight(Tensors(files, module), part, settings)
        if weight is not None:
            found.weights[name] = {f"{module}.weight": weight}
            found.others |= {f"{module}.{each}" for each in _OTHER_PARTS}
    return found


def _weight(tensors: Tensors, part: str, settings: CompressedSettings) -> StoredWeight | None:
    """The quantized weight that a tensor belongs to; None if the tensor is not quantized."""
    dtype = tensors.files.stored_dtype(tensors.name(part))
    if part == "weight_packed":
        if dtype != torch.uint8:
            return _PackedWords(tensors)
        if tensors.has("weight_global_scale"):
            return NVFP4Weight(tensors, part, "weight_global_scale", is_reciprocal=True)
        return _MXFP4(tensors)
    if dtype == torch.float8_e4m3fn:
        return Fp8Weight(tensors, "weight_scale", settings.blocks)
    if dtype == torch.int8:
        weight = _ByteLevels(tensors)
        return _Int8Levels(tensors) if settings.rounds_inputs and weight.is_plain else weight
    if tensors.has("weight_scale"):
        raise CheckpointError(
            f"the weights' tensor {shown_name(tensors.name('weight'))} is stored as"
            f" {str(dtype).removeprefix('torch.')} beside"
            f" {shown_name(tensors.name('weight_scale'))}, as before it was compressed; save the"
            " model compressed"
        )
    return None


def _num_groups(tensors: Tensors, num_outputs: int, num_inputs: int) -> int:
    """Number of groups of a weight, from the shape of its scales. Raises CheckpointError if the
    number of groups does not divide the number of inputs."""
    name = tensors.name("weight_scale")
    shape = tensors.files.shape(name) if tensors.has("weight_scale") else ()
    groups = shape[1] if len(shape) == 2 and shape[1] else 1
    tensors.check("weight_scale", SCALES, [num_outputs, groups], [num_outputs], *_OF_ALL)
    if num_inputs % groups:
        raise CheckpointError(
            f"the weights' tensor {shown_name(name)} has {groups} groups for {num_inputs} inputs,"
            " which are no groups of equal size; the download is not whole, or config.json"
            " describes another model"
        )
    return groups


def _scales(tensors: Tensors, span: range, num_groups: int) -> torch.Tensor:
    """The scales of some rows: [R, G]."""
    shape = tensors.files.shape(tensors.name("weight_scale"))
    if list(shape) in _OF_ALL:
        return tensors.copy("weight_scale").view(1, 1).expand(len(span), 1).contiguous()
    with tensors.rows("weight_scale", span) as scales:
        return scales.reshape(len(span), num_groups).clone()


class _Integers(GroupedWeight):
    """A weight of signed integers. They are read as unsigned codes, with half of their range added.

    Subclasses set `width` and `shape` before they call `__init__`.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self.num_groups = _num_groups(tensors, *self.shape)
        self.kind = f"W{self.width}A16"
        self.scale_dtype = tensors.dtype("weight_scale")
        self.zero = 1 << self.width - 1
        num_outputs, num_inputs = self.shape
        if tensors.has("weight_g_idx"):
            tensors.check("weight_g_idx", (torch.int32, torch.int64), [num_inputs])
        if tensors.has("weight_zero_point"):
            self.zero = None
            self.check_zeros(num_outputs)

    @abstractmethod
    def check_zeros(self, num_outputs: int) -> None:
        """Raises CheckpointError for zeros of a wrong shape or dtype."""

    def read_scales(self, span: range) -> torch.Tensor:
        return _scales(self._tensors, span, self.num_groups)

    def read_group_index(self) -> torch.Tensor | None:
        if not self._tensors.has("weight_g_idx"):
            return None
        index = self._tensors.copy("weight_g_idx").long()
        low, high = int(index.min()), int(index.max())
        if (low, high) == (-1, -1):  # stored if the inputs of groups are contiguous
            return None
        if low < 0 or high >= self.num_groups:
            raise CheckpointError(
                f"the weights' tensor {shown_name(self._tensors.name('weight_g_idx'))} names the"
                f" group {low if low < 0 else high}, but there are {self.num_groups}; fetch it"
                " again"
            )
        return index


class _PackedWords(_Integers):
    def __init__(self, tensors: Tensors) -> None:
        num_outputs, num_words = tensors.shape("weight_packed", (torch.int32,), 2)
        tensors.check("weight_shape", (torch.int64, torch.int32), [2])
        stored = tensors.copy("weight_shape").tolist()
        num_inputs = stored[1]
        widths = [bits for bits in _PACKED_BITS if -(-num_inputs * bits // 32) == num_words]
        if stored[0] != num_outputs or num_inputs < 1 or not widths:
            raise UnsupportedModelError(
                f"the weights' tensor {shown_name(tensors.name('weight_packed'))} has the shape"
                f" {[num_outputs, num_words]} for a weight of {stored}, but quire reads 4 or 8 bits"
                f" for each number; {ADVICE}"
            )
        self.width, self.shape = widths[0], (num_outputs, num_inputs)
        super().__init__(tensors)

    def check_zeros(self, num_outputs: int) -> None:
        words = -(-num_outputs * self.width // 32)
        self._tensors.check("weight_zero_point", (torch.int32,), [words, self.num_groups])

    def read_codes(self, span: range) -> torch.Tensor:
        with self._tensors.rows("weight_packed", span) as words:
            return unpack_inputs(words, self.width)[:, : self.shape[1]]

    def read_zeros(self, span: range) -> torch.Tensor:
        each = 32 // self.width
        words = range(span.start // each, -(-span.stop // each))
        with self._tensors.rows("weight_zero_point", words) as lent:
            zeros = unpack_inputs(lent.T, self.width)
        first = span.start % each
        return zeros[:, first : first + len(span)].T.contiguous()


class _ByteLevels(_Integers):
    """A weight with one code in each int8, even if its settings say 4 bits."""

    width = 8

    def __init__(self, tensors: Tensors) -> None:
        num_outputs, num_inputs = tensors.shape("weight", (torch.int8,), 2)
        self.shape = (num_outputs, num_inputs)
        super().__init__(tensors)

    @property
    def is_plain(self) -> bool:
        """Whether each output has one scale, and zeros are not stored."""
        has_order = self._tensors.has("weight_g_idx")
        return self.num_groups == 1 and self.zero is not None and not has_order

    def check_zeros(self, num_outputs: int) -> None:
        shape = [num_outputs, self.num_groups]
        self._tensors.check("weight_zero_point", (torch.int8,), shape, *_OF_ALL)

    def read_codes(self, span: range) -> torch.Tensor:
        with self._tensors.rows("weight", span) as levels:
            return levels.view(torch.uint8) ^ 0x80

    def read_zeros(self, span: range) -> torch.Tensor:
        zeros = self._tensors.copy("weight_zero_point").view(torch.uint8) ^ 0x80
        if zeros.numel() == 1:
            return zeros.view(1, 1).expand(len(span), 1).contiguous()
        return zeros.view(-1, self.num_groups)[span.start : span.stop]


class _Int8Levels(StoredWeight):
    """A weight of int8 with a scale for each output, multiplied by activations rounded to int8.
    `BlockFormat.is_int8` recognizes its block format."""

    kind = "W8A8"
    block_format = BlockFormat(kind, 8, 0, zero=128, scale_dtype=torch.float32)

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        num_outputs, num_inputs = tensors.shape("weight", (torch.int8,), 2)
        self.shape = (num_outputs, num_inputs)

    def codes(self, span: range) -> UnpackedRows:
        with self._tensors.rows("weight", span) as levels:
            codes = levels.view(torch.uint8) ^ 0x80
        return UnpackedRows(self.block_format, codes, _scales(self._tensors, span, 1).float())

    def numbers(self, span: range) -> torch.Tensor:
        return self.codes(span).numbers()


class _MXFP4(MXFP4Weight):
    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        num_outputs, num_bytes = tensors.shape("weight_packed", (torch.uint8,), 2)
        self.num_groups = num_bytes // 16
        self.shape = (num_outputs, num_bytes * 2)
        tensors.check("weight_scale", (torch.uint8,), [num_outputs, -(-num_bytes // 16)])

    def read_codes(self, span: range) -> torch.Tensor:
        with self._tensors.rows("weight_packed", span) as packed:
            return unpack_inputs(packed, 4)

    def read_scales(self, span: range) -> torch.Tensor:
        with self._tensors.rows("weight_scale", span) as stored:
            return powers_of_two(stored, self._tensors.name("weight_scale"))
