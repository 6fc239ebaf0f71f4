"""AWQ weights in the layout that AutoAWQ calls gemm.

    X.qweight  [I, O / 8] int32    codes of eight neighbouring outputs, in the order 0 2 4 6 1 3 5 7
    X.qzeros   [G, O / 8] int32    zeros, likewise
    X.scales   [G, O]              floats

(Lin et al., arXiv:2306.00978; AutoAWQ's awq/modules/linear/gemm.py.)

Shapes: O outputs, I inputs, G groups, R rows (outputs).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from quire.errors import CheckpointError
from quire.formats.block_quantized.weights import CodeWords
from quire.hub.model_files import shown_name
from quire.models.checkpoints.quantized.quantized_files import FoundWeights
from quire.models.checkpoints.quantized.settings import SettingFields
from quire.models.checkpoints.quantized.stored_weight import SCALES, Tensors, WordWeight
from quire.models.checkpoints.safetensors_files import SafetensorsFiles

NAME = "AWQ"
_IN_WORD = 8
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""For each 4 bits of a word, from the lowest bits up, the index of their output."""

_UNREAD = (
    *("act_group_aware", "adapter", "autoround_version", "backend", "batch_size", "damp_percent"),
    *("data_type", "desc_act", "do_fuse", "enable_quanted_input", "exllama_config"),
    *("fuse_max_seq_len", "group_aware", "iters", "lm_head", "low_gpu_mem_usage", "lr", "meta"),
    *("method", "minmax_lr", "model_seqlen", "modules_to_fuse", "modules_to_not_convert"),
    *("nsamples", "quant_method", "seqlen", "static_groups", "sym", "to_quant_block_names"),
    *("true_sequential",),
)


class AWQSettings:
    """The settings of AWQ that affect how weights are read."""

    def __init__(self, fields: SettingFields) -> None:
        """Read the settings. Raises UnsupportedModelError for unknown ones, and CheckpointError for
        malformed ones."""
        fields.one_of("bits" if fields.value("w_bit") is None else "w_bit", (4,))
        name = "group_size" if fields.value("q_group_size") is None else "q_group_size"
        #: Number of inputs in a group; -1 means all inputs.
        self.group_size = fields.size(name, 128)
        fields.one_of("zero_point", (True, False), True)  # the files have zeros in either case
        fields.one_of("pack_dtype", ("int32", "torch.int32"), "int32")
        for field in ("version", "format", "checkpoint_format"):
            value = fields.value(field)
            if not isinstance(value, str) or value.lower() != "gemm":
                fields.one_of(field, ("gemm",), "gemm")
        fields.ignore(*_UNREAD)
        fields.ignore_auto_round()
        fields.finish()


def find_weights(files: SafetensorsFiles, settings: AWQSettings) -> FoundWeights:
    """The quantized weights in `files`. Raises CheckpointError for tensors that don't match."""
    found = FoundWeights()
    for name in files.names:
        module, _, part = name.rpartition(".")
        if part != "qweight":
            continue
        weight = _AWQWeight(Tensors(files, module), settings.group_size)
        found.weights[name] = {f"{module}.weight": weight}
        found.others |= {f"{module}.{each}" for each in ("qzeros", "scales")}
    return found


class _AWQWeight(WordWeight):
    kind = NAME
    width = 4
    zero = None

    def __init__(self, tensors: Tensors, group_size: int) -> None:
        self._tensors = tensors
        num_inputs, num_words = tensors.shape("qweight", (torch.int32,), 2)
        self.shape = (num_words * _IN_WORD, num_inputs)
        size = num_inputs if group_size == -1 else group_size
        if num_inputs % size:
            raise CheckpointError(
                f"{shown_name(tensors.name('qweight'))} has {num_inputs} inputs, which are not"
                f" groups of {size}, as config.json says; it describes another model"
            )
        self.num_groups = num_inputs // size
        tensors.check("qzeros", (torch.int32,), [self.num_groups, num_words])
        tensors.check("scales", SCALES, [self.num_groups, self.shape[0]])
        self.scale_dtype = tensors.dtype("scales")

    def lent_words(self, span: range) -> AbstractContextManager[CodeWords]:
        return self._lent("qweight", span)

    def read_zeros(self, span: range) -> torch.Tensor:
        with self._lent("qzeros", span) as words:
            return words.unpacked()

    @contextmanager
    def _lent(self, part: str, span: range) -> Iterator[CodeWords]:
        with self._tensors.whole(part) as lent:
            words = lent[:, span.start // _IN_WORD : -(-span.stop // _IN_WORD)]
            yield CodeWords(words, 4, span.start % _IN_WORD, len(span), _ORDER)

    def read_scales(self, span: range) -> torch.Tensor:
        with self._tensors.whole("scales") as scales:
            return scales[:, span.start : span.stop].T.contiguous()
