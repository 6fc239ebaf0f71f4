"""The registry of quantization methods of checkpoints: supported ones, and those refused by name.

config.json names a method. If it doesn't, names of tensors may reveal the method, so that the
refusal can name it. A new method is a module with settings and `find_weights`, and a line in
`_METHODS`. Called by `registry` for the config, by `readers` for the weights, and by `loader`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import UnsupportedModelError, shown
from quire.models.checkpoints.quantized import awq, compressed_tensors, fp8, gptq, mxfp4, nvfp4
from quire.models.checkpoints.quantized.quantized_files import FoundWeights, QuantizedFiles
from quire.models.checkpoints.quantized.settings import ADVICE, Quantized, SettingFields
from quire.models.checkpoints.safetensors_files import SafetensorsFiles

CONFIG_FIELDS = ("quantization_config", "compression_config", "quantization")
"""Fields of config.json that hold the settings of a method. The last field is written by MLX."""


@dataclass(frozen=True, slots=True)
class _Method:
    """A method whose weights can be read."""

    name: str
    #: Reads the method's settings.
    read: Callable[[SettingFields], Any]
    #: Finds the quantized weights in the files, given the settings.
    find: Callable[[SafetensorsFiles, Any], FoundWeights]


_FP8 = _Method(fp8.NAME, fp8.Fp8Settings, fp8.find_weights)
_MODELOPT = _Method(nvfp4.NAME, nvfp4.ModelOptSettings, nvfp4.find_weights)
_METHODS = {
    "awq": _Method(awq.NAME, awq.AWQSettings, awq.find_weights),
    "compressed-tensors": _Method(
        compressed_tensors.NAME,
        compressed_tensors.CompressedSettings,
        compressed_tensors.find_weights,
    ),
    "fbgemm_fp8": _FP8,
    "fp8": _FP8,
    "gptq": _Method(gptq.NAME, gptq.GPTQSettings, gptq.find_weights),
    "modelopt": _MODELOPT,
    "modelopt_fp4": _MODELOPT,
    "mxfp4": _Method(mxfp4.NAME, mxfp4.MXFP4Settings, mxfp4.find_weights),
}
_REFUSED = {
    "aqlm": "AQLM",
    "bitnet": "BitNet",
    "bitsandbytes": "bitsandbytes",
    "bnb": "bitsandbytes",
    "exl2": "EXL2",
    "exl3": "EXL3",
    "hqq": "HQQ",
    "marlin": "Marlin",
    "quark": "AMD Quark",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
_SUFFIXES = {
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".g_idx": "GPTQ",
    ".absmax": "bitsandbytes",
    ".quant_map": "bitsandbytes",
    ".q_weight": "EXL2",
    ".trellis": "EXL3",
    ".weight_scale_inv": "fp8",
    ".weight_scale": "fp8 or compressed-tensors",
    ".weight_packed": "compressed-tensors",
    "_blocks": "MXFP4",
}
"""Maps suffixes of tensor names that only quantized weights have to the methods that write them."""


def read_quantized(what: str, raw: Mapping[str, Any]) -> Quantized | None:
    """The quantization that a config declares; None for plain weights. `what` is the folder.

    Raises UnsupportedModelError for an unknown method or setting, and CheckpointError.
    """
    found = _find_settings(what, raw)
    if found is None:
        return None
    method, settings = found
    remarks = tuple(dict.fromkeys(getattr(settings, "remarks", ())))
    return Quantized(method.name, remarks, getattr(settings, "has_token_scales", False))


def open_quantized(
    what: str, raw: Mapping[str, Any], files: SafetensorsFiles
) -> SafetensorsFiles | QuantizedFiles:
    """The weights in `files`, read by the method that the config declares. `what` is the folder.

    Raises UnsupportedModelError and CheckpointError.
    """
    found = _find_settings(what, raw)
    if found is None:
        return files
    method, settings = found
    return QuantizedFiles(files, method.find(files, settings))


def refuse_quantized_names(what: str, names: Iterable[str]) -> None:
    """Raises UnsupportedModelError if a tensor name shows quantized weights, although the config
    declares none. `what` is the folder."""
    for name in names:
        for suffix, method in _SUFFIXES.items():
            if name.endswith(suffix):
                raise UnsupportedModelError(_refusal(what, method, f"its tensor {shown(name)}"))


def _find_settings(what: str, raw: Mapping[str, Any]) -> tuple[_Method, Any] | None:
    text = raw.get("text_config")
    for config in (raw, text if isinstance(text, dict) else {}):
        for field in CONFIG_FIELDS:
            if config.get(field) is not None:
                return _read_settings(what, field, config[field])
    return None


def _read_settings(what: str, field: str, settings: Any) -> tuple[_Method, Any]:
    name = settings.get("quant_method") if isinstance(settings, dict) else None
    name = name.lower() if isinstance(name, str) else None
    method = None if field == "quantization" else _METHODS.get(name or "")
    if method is None:
        refused = "MLX" if field == "quantization" else "an unnamed method"
        if name is not None and field != "quantization":
            refused = _REFUSED.get(name) or shown(name)
        raise UnsupportedModelError(_refusal(what, refused, f"its {field}"))
    return method, method.read(SettingFields(settings, f"{what}: its {field}"))


def _refusal(what: str, method: str, sign: str) -> str:
    return (
        f"{what} holds weights quantized by {method} (as {sign} says), which quire does not read;"
        f" {ADVICE}"
    )
