"""GPTQ weights in the layout of AutoGPTQ, GPTQModel and auto-round.

    X.qweight  [I * bits / 32, O] int32    codes of neighbouring inputs, from the lowest bits up
    X.qzeros   [G, O * bits / 32] int32    zeros of neighbouring outputs; version 1 stores zero - 1
    X.scales   [G, O]                      floats
    X.g_idx    [I] int32                   the group of each input; may be missing

With act-order (desc_act) the inputs of a group are not contiguous. Version 1 subtracts 1 from each
zero, by one subtraction from the whole word, with borrows between zeros. The reader undoes it by
adding the same word. (Frantar et al., arXiv:2210.17323; GPTQModel's utils/model.py.)

Shapes: O outputs, I inputs, G groups.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quire.errors import CheckpointError, UnsupportedModelError
from quire.formats.block_quantized.weights import CodeWords, unpack_inputs
from quire.hub.model_files import shown_name
from quire.models.checkpoints.quantized.quantized_files import FoundWeights
from quire.models.checkpoints.quantized.settings import ADVICE, SettingFields
from quire.models.checkpoints.quantized.stored_weight import SCALES, Tensors, WordWeight
from quire.models.checkpoints.safetensors_files import SafetensorsFiles

NAME = "GPTQ"
_BITS = (4, 8)
_ONES = {4: 0x11111111, 8: 0x01010101}
_UNREAD = (
    *("act_group_aware", "adapter", "auto_round_version", "autoround_version", "backend"),
    *("batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment"),
    *("damp_percent", "data_type", "dataset", "disable_exllama", "enable_quanted_input"),
    *("exllama_config", "fallback", "format", "gradient_accumulate_steps", "hyb_act", "iters"),
    *("low_gpu_mem_usage", "lr", "max_input_length", "meta", "method", "minmax_lr"),
    *("model_file_base_name", "model_name_or_path", "model_seqlen", "module_dependency"),
    *("module_name_preceding_first_block", "modules_in_block_to_quantize", "mse", "nsamples"),
    *("offload_to_disk", "pad_token_id", "quant_method", "quantizer", "rotation", "seqlen"),
    *("static_groups", "to_quant_block_names", "tokenizer", "true_sequential", "use_cuda_fp16"),
    *("use_exllama", "v2", "v2_alpha"),
)
"""Ignored fields: how weights were computed; which linears are quantized (the files show it)."""


class GPTQSettings:
    """The settings of GPTQ that affect how weights are read."""

    def __init__(self, fields: SettingFields) -> None:
        """Read the settings. Raises UnsupportedModelError for unknown ones, and CheckpointError for
        malformed ones."""
        #: Number of bits of a code; None if it differs between linears.
        self.bits: int | None = fields.one_of("bits", _BITS)
        #: Number of inputs in a group, for linears without a group index; -1 means all inputs.
        self.group_size = fields.size("group_size", -1)
        name = "checkpoint_format" if fields.value("checkpoint_format") is not None else "format"
        version = fields.one_of(name, ("gptq", "gptq_v2"), "gptq")
        #: Whether stored zeros are too small by 1, as in version 1.
        self.is_first_version = version == "gptq"
        self.is_symmetric = fields.one_of("sym", (True, False), True)
        fields.one_of("is_marlin_format", (False,), False)
        fields.one_of("pack_dtype", ("int32", "torch.int32"), "int32")
        # The files show which linears differ, and how.
        if fields.value("dynamic"):
            self.bits = None
        fields.ignore("desc_act", "lm_head", "modules_to_not_convert", "extra_config", *_UNREAD)
        fields.ignore_auto_round()
        fields.finish()


def find_weights(files: SafetensorsFiles, settings: GPTQSettings) -> FoundWeights:
    """The quantized weights in `files`. Raises CheckpointError for tensors that don't match."""
    found = FoundWeights()
    for name in files.names:
        module, _, part = name.rpartition(".")
        if part != "qweight":
            continue
        weight = _GPTQWeight(Tensors(files, module), settings)
        found.weights[name] = {f"{module}.weight": weight}
        found.others |= {f"{module}.{each}" for each in ("qzeros", "scales", "g_idx")}
    return found


class _GPTQWeight(WordWeight):
    kind = NAME

    def __init__(self, tensors: Tensors, settings: GPTQSettings) -> None:
        self._tensors = tensors
        self._adds_one = settings.is_first_version
        num_rows, num_outputs = tensors.shape("qweight", (torch.int32,), 2)
        self._has_index = tensors.has("g_idx")
        if self._has_index:
            (num_inputs,) = tensors.shape("g_idx", (torch.int32, torch.int64), 1)
            self.width = self._width(num_rows * 32, num_inputs, settings.bits)
        elif settings.bits is None:
            raise CheckpointError(
                f"the weights have no {shown_name(tensors.name('g_idx'))}, without which its bits"
                " are not known, as config.json says that linears differ (dynamic); fetch it again"
            )
        else:
            self.width, num_inputs = settings.bits, num_rows * 32 // settings.bits
        self.shape = (num_outputs, num_inputs)
        self.num_groups, _ = tensors.shape("scales", SCALES, 2)
        self._size = num_inputs if settings.group_size == -1 else settings.group_size
        if not self._has_index:
            self.num_groups = -(-num_inputs // self._size)
        tensors.check("scales", SCALES, [self.num_groups, num_outputs])
        words = -(-num_outputs * self.width // 32)
        tensors.check("qzeros", (torch.int32,), [self.num_groups, words])
        self.scale_dtype = tensors.dtype("scales")
        # Symmetric weights share one zero, so that kernels need not read zeros.
        self.zero = self._common_zero() if settings.is_symmetric else None

    def _width(self, num_bits: int, num_inputs: int, bits: int | None) -> int:
        width, rest = divmod(num_bits, num_inputs)
        if rest or width not in _BITS or width != (bits or width):
            wanted = " or ".join(map(str, _BITS if bits is None else (bits,)))
            raise UnsupportedModelError(
                f"{shown_name(self._tensors.name('qweight'))} has {num_bits} bits for the"
                f" {num_inputs} inputs of its g_idx, but quire reads {wanted} for each; {ADVICE}"
            )
        return width

    def _common_zero(self) -> int | None:
        """The zero of all groups; None if they differ."""
        zeros = self.read_zeros(range(self.shape[0]))
        first = int(zeros[0, 0])
        return first if bool((zeros == first).all()) else None

    @contextmanager
    def lent_words(self, span: range) -> Iterator[CodeWords]:
        with self._tensors.whole("qweight") as words:
            yield CodeWords(words[:, span.start : span.stop], self.width, 0, len(span))

    def read_scales(self, span: range) -> torch.Tensor:
        with self._tensors.whole("scales") as scales:
            return scales[:, span.start : span.stop].T.contiguous()

    def read_zeros(self, span: range) -> torch.Tensor:
        each = 32 // self.width
        with self._tensors.whole("qzeros") as words:
            words = words[:, span.start // each : -(-span.stop // each)]
            words = words + _ONES[self.width] if self._adds_one else words
            zeros = unpack_inputs(words, self.width)
        first = span.start % each
        return zeros[:, first : first + len(span)].T.contiguous()

    def read_group_index(self) -> torch.Tensor | None:
        if not self._has_index:
            return torch.arange(self.shape[1]) // self._size
        index = self._tensors.copy("g_idx").long()
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= self.num_groups:
            raise CheckpointError(
                f"the weights' tensor {shown_name(self._tensors.name('g_idx'))} names the group"
                f" {low if low < 0 else high}, but there are {self.num_groups}; fetch it again"
            )
        return index
