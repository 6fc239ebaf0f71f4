"""Reads an adapter from a folder that PEFT saved: a small config, and a safetensors file.

    adapter_config.json          r, lora_alpha and other fields that say how the tensors are used
    adapter_model.safetensors    base_model.model.<path of a linear>.lora_A.weight [r, I]
                                 base_model.model.<path of a linear>.lora_B.weight [O, r]

Settings that change a model's results in another way than `adapter.py` describes are refused by
name, and so are unknown fields. No pickle is read. After the file's header is read, `targets.py`
checks that the model has the linears; only then are the tensors read.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.adapters.adapter import LoRAAdapter, LoRAWeights
from quire.adapters.path_patterns import PathPatterns, PatternError
from quire.adapters.slots import AdapterSlots
from quire.errors import AdapterError, CheckpointError, shown
from quire.hub.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from quire.hub.model_files import read_json_object, shown_name
from quire.hub.safetensors_header import StoredTensor, read_header

MAX_FILE_BYTES = 16 << 30
"""An adapter of rank 256 for all linears of a model of 70 billion weights takes 12 GiB in fp32."""

MAX_CONFIG_BYTES = 4 << 20
"""A config with a pattern for each of 1,000 linears takes 100 KiB."""

_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

_REFUSED_FIELDS = {
    "use_dora": "DoRA scales the base model's own weights",
    "modules_to_save": "whole modules are saved beside the adapter",
    "lora_bias": "B has a bias",
    "trainable_token_indices": "embeddings of single tokens are trained",
    "layer_replication": "layers are repeated",
    "target_parameters": "parameters that belong to no linear, as stacked experts do, are trained",
    "alora_invocation_tokens": "an activated LoRA adds nothing before its invocation tokens",
    "use_qalora": "QA-LoRA pools the inputs",
    "arrow_config": "Arrow routes among several adapters",
    "megatron_config": "linears of Megatron are split",
}
_UNUSED_FIELDS = {
    *("task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
    *("peft_version", "target_modules", "exclude_modules", "lora_dropout", "layers_pattern"),
    *("megatron_core", "loftq_config", "eva_config", "corda_config", "qalora_group_size"),
    *("ensure_weight_tying", "runtime_config", "lora_ga_config"),
    # fan_in_fan_out matters only when B A is merged into a transposed weight; quire merges nothing.
    "fan_in_fan_out",
}
"""Fields that are ignored: they concern training or merging, or repeat what the tensors show."""
_READ_FIELDS = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias"),
    *("init_lora_weights", "layers_to_transform"),
}
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initializations that subtract the adapter's initial weights from the base model's weights."""

_KEY = re.compile(r"^base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight$")
_REFUSED_KEYS = {
    ".lora_embedding_": "it adapts an embedding, which is not served",
    ".lora_magnitude_vector": "it is DoRA's, which is not served",
    ".lora_A.bias": "A has a bias, which is not served",
    ".lora_B.bias": "B has a bias, which is not served",
}


def read_adapter(
    folder: Path,
    max_rank: int,
    model: AdapterSlots | None = None,
    *,
    encodes_images: bool = False,
) -> LoRAAdapter:
    """Read the adapter in `folder`. A rank above `max_rank` is refused.

    If `model` is given, checks that all shapes fit the model before tensors are read into memory.
    Weights for the linears of its encoders are left out, or refused if `encodes_images`. Raises
    AdapterError, which names the folder and the fault.
    """
    try:
        if not folder.is_dir():
            raise AdapterError(f"adapter {folder}: it is not a folder; name one that PEFT saved")
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (folder / name).is_file():  # reading a named pipe would wait forever
                raise AdapterError(_missing(folder, name))
        for name, max_bytes in ((CONFIG_FILE, MAX_CONFIG_BYTES), (WEIGHTS_FILE, MAX_FILE_BYTES)):
            if (folder / name).stat().st_size > max_bytes:
                raise AdapterError(
                    f"adapter {folder}: {name} has more than {max_bytes} bytes, too many for an "
                    "adapter"
                )
        config = read_json_object(folder / CONFIG_FILE)
        scalings = _Scalings(folder, config)
        layers = _layers(folder, config)
        header = read_header(folder / WEIGHTS_FILE)
        pairs = _pairs(folder, header, model, encodes_images=encodes_images)
        _check_pairs(folder, pairs, max_rank)
        if model is not None:
            model.check_shapes(LoRAAdapter(str(folder), _shapes(pairs), layers))
        # Matching patterns takes time per linear, so it follows the check of the number of linears.
        _check_ranks(folder, pairs, scalings)
        weights = _read_weights(folder / WEIGHTS_FILE, pairs, scalings)
    except CheckpointError as error:
        raise AdapterError(f"adapter {folder}: {error}") from error
    except OSError as error:
        raise AdapterError(f"adapter {folder}: it can't be read: {error.strerror}") from error
    for path, each in weights.items():
        if not (each.a.isfinite().all() and each.b.isfinite().all()):
            raise AdapterError(
                f"adapter {folder}: the tensors of {shown_name(path)} hold infinite numbers or NaN"
            )
    return LoRAAdapter(str(folder), weights, layers)


def _missing(folder: Path, name: str) -> str:
    pickles = [each for each in _PICKLES if (folder / each).exists()]
    if name == WEIGHTS_FILE and pickles:
        return (
            f"adapter {folder}: its weights are a pickle, {pickles[0]}, which could run anything "
            "when it is read; save them with PEFT's safe_serialization=True"
        )
    return f"adapter {folder}: it has no {name}; name a folder that PEFT saved"


class _Scalings:
    """Computes the rank and the scaling of each linear from an adapter's config."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Raises AdapterError for unsupported or unknown fields."""
        self._folder = folder
        _check_fields(folder, config)
        self._rank = self._integer(config.get("r"), "r")
        self._alpha = self._number(config.get("lora_alpha"), "lora_alpha")
        self._is_root = bool(config.get("use_rslora"))
        self._ranks = self._by_pattern(config, "rank_pattern", self._integer)
        self._alphas = self._by_pattern(config, "alpha_pattern", self._number)

    def rank(self, path: str) -> int:
        """The rank of a linear. Raises AdapterError if matching patterns takes too long."""
        return int(self._of_pattern("rank_pattern", self._ranks, path, self._rank))

    def scaling(self, path: str) -> float:
        """The factor alpha / r, or rsLoRA's alpha / sqrt(r) (Kalajdzievski, arXiv:2312.03732)."""
        rank = self.rank(path)
        alpha = float(self._of_pattern("alpha_pattern", self._alphas, path, self._alpha))
        return alpha / (math.sqrt(rank) if self._is_root else rank)

    def _by_pattern(
        self, config: Mapping[str, Any], name: str, check: Any
    ) -> tuple[PathPatterns, list[Any]]:
        """Read a field that maps patterns to values. Returns the patterns, and the values in the
        same order."""
        given = config.get(name) or {}
        if not isinstance(given, dict):
            raise self._wrong(name, given, "an object")
        for pattern, value in given.items():
            check(value, f"{name} of {shown_name(pattern)}")
        try:
            return PathPatterns(given), list(given.values())
        except PatternError as error:
            raise self._refused(name, error) from None

    def _of_pattern(
        self, name: str, by_pattern: tuple[PathPatterns, list[Any]], path: str, default: Any
    ) -> Any:
        """The value of the first pattern that matches the end of the path, as in PEFT; else
        `default`."""
        patterns, values = by_pattern
        try:
            index = patterns.first(path)
        except PatternError as error:
            raise self._refused(name, error) from None
        return default if index is None else values[index]

    def _refused(self, name: str, error: PatternError) -> AdapterError:
        which = "its patterns" if error.pattern is None else shown(error.pattern)
        return AdapterError(f"adapter {self._folder}: {CONFIG_FILE}: {name}: {which} {error}")

    def _integer(self, value: Any, name: str) -> int:
        if type(value) is not int or not 1 <= value <= 1 << 20:
            raise self._wrong(name, value, "a whole number above 0")
        return value

    def _number(self, value: Any, name: str) -> float:
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._wrong(name, value, "a finite number")
        return float(value)

    def _wrong(self, name: str, value: object, wanted: str) -> AdapterError:
        return AdapterError(
            f"adapter {self._folder}: {CONFIG_FILE}: {name} is {shown(value)}, but must be {wanted}"
        )


def _check_fields(folder: Path, config: Mapping[str, Any]) -> None:
    where = f"adapter {folder}: {CONFIG_FILE}: "
    if config.get("peft_type") != "LORA":
        raise AdapterError(
            f"{where}peft_type is {shown(config.get('peft_type'))}, but must be LORA"
        )
    for name, why in _REFUSED_FIELDS.items():
        if config.get(name):
            raise AdapterError(
                f"{where}{name} is {shown(config[name])}, which is not served: {why}"
            )
    if config.get("bias", "none") != "none":
        raise AdapterError(
            f"{where}bias is {shown(config['bias'])}, which is not served: the base model's own "
            "biases are trained"
        )
    begin = config.get("init_lora_weights")
    if isinstance(begin, str) and begin.lower().startswith(_CHANGES_BASE):
        raise AdapterError(
            f"{where}init_lora_weights is {shown(begin)}, which changes the base model's "
            "weights; let PEFT convert the adapter when it saves it "
            "(path_initial_model_for_weight_conversion)"
        )
    known = _READ_FIELDS | _UNUSED_FIELDS | _REFUSED_FIELDS.keys()
    for name, value in config.items():
        if name not in known and value:
            raise AdapterError(
                f"{where}{shown_name(name)} is {shown(value)}, which is not understood; "
                "ignoring it could change the results"
            )


def _layers(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    layers = config.get("layers_to_transform")
    listed = [layers] if isinstance(layers, int) else layers or []
    if not isinstance(listed, list) or any(type(each) is not int or each < 0 for each in listed):
        raise AdapterError(
            f"adapter {folder}: {CONFIG_FILE}: layers_to_transform is {shown(layers)}, but must be "
            "numbers of layers"
        )
    return tuple(listed)


_Pairs = dict[str, dict[str, StoredTensor]]
"""The stored tensors "A" and "B" by a linear's path."""


def _pairs(
    folder: Path,
    header: Mapping[str, StoredTensor],
    model: AdapterSlots | None,
    *,
    encodes_images: bool,
) -> _Pairs:
    """The stored tensors of linears in the language model. See `read_adapter` for those of other
    linears."""
    pairs: _Pairs = {}
    for name, tensor in header.items():
        found = _KEY.match(name)
        if found is None:
            raise AdapterError(f"adapter {folder}: {shown_name(name)}: {_why_refused(name)}")
        path, side = found.groups()
        if model is not None and not model.uses(path):
            if encodes_images:
                raise AdapterError(
                    f"adapter {folder}: {shown_name(path)} is no linear of the language model, but "
                    "images are encoded without adapters; train none outside of it, or set "
                    "language_model_only to serve the rest of the adapter for text"
                )
            continue
        if pairs.setdefault(path, {}).setdefault(side, tensor) is not tensor:
            raise AdapterError(f"adapter {folder}: {shown_name(path)} has two tensors {side}")
        if tensor.dtype not in _DTYPES:
            raise AdapterError(
                f"adapter {folder}: {shown_name(name)} is stored as {tensor.dtype}, but only "
                f"{', '.join(_DTYPES)} can be read"
            )
        if len(tensor.shape) != 2 or not all(tensor.shape):
            raise AdapterError(
                f"adapter {folder}: {shown_name(name)} is {list(tensor.shape)}, but a linear's has "
                "two dimensions, and neither is 0"
            )
    if not pairs:
        which = "of the language model" if header else ""
        raise AdapterError(f"adapter {folder}: {WEIGHTS_FILE} has no tensors {which}".rstrip())
    return pairs


def _why_refused(name: str) -> str:
    for part, why in _REFUSED_KEYS.items():
        if part in name:
            return why
    return (
        "it is neither A nor B of a LoRA; weights of the base model, or modules saved beside the "
        "adapter, are not served"
    )


def _check_pairs(folder: Path, pairs: _Pairs, max_rank: int) -> None:
    for path, pair in pairs.items():
        if pair.keys() != {"A", "B"}:
            raise AdapterError(
                f"adapter {folder}: {shown_name(path)} has only one of the tensors A and B"
            )
        rank, other = pair["A"].shape[0], pair["B"].shape[1]
        if rank != other:
            raise AdapterError(f"adapter {folder}: {_of_other_ranks(path, pair)}")
        if rank > max_rank:
            raise AdapterError(
                f"adapter {folder}: {shown_name(path)} has rank {rank}, above max_lora_rank, "
                f"{max_rank}; raise that option"
            )


def _check_ranks(folder: Path, pairs: _Pairs, scalings: _Scalings) -> None:
    for path, pair in pairs.items():
        rank = scalings.rank(path)
        if pair["A"].shape[0] != rank:
            raise AdapterError(
                f"adapter {folder}: {_of_other_ranks(path, pair)}; {CONFIG_FILE} says rank {rank}"
            )


def _of_other_ranks(path: str, pair: Mapping[str, StoredTensor]) -> str:
    return (
        f"{shown_name(path)}: A is {list(pair['A'].shape)} and B {list(pair['B'].shape)}, but A "
        "must be [rank, inputs], B [outputs, rank]"
    )


def _shapes(pairs: _Pairs) -> dict[str, LoRAWeights]:
    """Tensors on the meta device, with the shapes that will be read."""

    def shape(tensor: StoredTensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=_DTYPES[tensor.dtype], device="meta")

    return {
        path: LoRAWeights(shape(each["A"]), shape(each["B"]), 1.0) for path, each in pairs.items()
    }


def _read_weights(path: Path, pairs: _Pairs, scalings: _Scalings) -> dict[str, LoRAWeights]:
    with path.open("rb") as file:
        return {
            name: LoRAWeights(
                _read_tensor(file, pair["A"]), _read_tensor(file, pair["B"]), scalings.scaling(name)
            )
            for name, pair in pairs.items()
        }


def _read_tensor(file: Any, tensor: StoredTensor) -> torch.Tensor:
    dtype = _DTYPES[tensor.dtype]
    num_bytes = math.prod(tensor.shape) * dtype.itemsize
    file.seek(tensor.start)
    content = np.fromfile(file, np.uint8, num_bytes)
    if len(content) < num_bytes:
        raise CheckpointError(f"{WEIGHTS_FILE} became shorter while it was read")
    return torch.from_numpy(content).view(dtype).view(tensor.shape)
