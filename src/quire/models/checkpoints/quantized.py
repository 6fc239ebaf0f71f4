"""Recognises checkpoints that are quantized already, and refuses them.

The message says what to name in its place. quire rounds weights itself, from an original
checkpoint. Knows no tensors. Called by `registry` for what config.json says, and by `loader` for
what the names of the weights say.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from quire.errors import UnsupportedModelError, shown

_CONFIG_FIELDS = ("quantization_config", "compression_config", "quantization")
"""Where config.json tells of it; the last one is MLX's."""

_METHOD_NAMES = {
    "awq": "AWQ",
    "bitnet": "BitNet",
    "bitsandbytes": "bitsandbytes",
    "bnb": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "fbgemm_fp8": "fp8 (FBGEMM)",
    "fp8": "fp8",
    "gptq": "GPTQ",
    "hqq": "HQQ",
    "modelopt": "NVIDIA ModelOpt",
    "mxfp4": "MXFP4",
    "torchao": "torchao",
}
_SUFFIXES = {
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".g_idx": "GPTQ",
    ".absmax": "bitsandbytes",
    ".quant_map": "bitsandbytes",
    ".weight_scale_inv": "fp8",
    ".weight_scale": "fp8 or compressed-tensors",
    ".weight_packed": "compressed-tensors",
    "_blocks": "MXFP4",
}
"""Endings of names that only quantized weights have -> who writes them."""


def refuse_quantized_config(what: str, raw: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError where a config tells of quantized weights. what: the folder."""
    for field in _CONFIG_FIELDS:
        settings = raw.get(field)
        if settings is not None:
            raise UnsupportedModelError(_refusal(what, _method(field, settings), f"its {field}"))


def refuse_quantized_weights(what: str, names: Iterable[str]) -> None:
    """Raises UnsupportedModelError where a tensor's name tells of it. what: the folder."""
    for name in names:
        for suffix, method in _SUFFIXES.items():
            if name.endswith(suffix):
                raise UnsupportedModelError(_refusal(what, method, f"its tensor {shown(name)}"))


def _method(field: str, settings: Any) -> str:
    if field == "quantization":
        return "MLX"
    name = settings.get("quant_method") if isinstance(settings, dict) else None
    if not isinstance(name, str):
        return "an unnamed method"
    return _METHOD_NAMES.get(name.lower(), shown(name))


def _refusal(what: str, method: str, sign: str) -> str:
    return (
        f"{what} holds weights quantized by {method} (as {sign} says), which quire does not serve;"
        " name the original checkpoint, in bfloat16, float16 or float32: quire rounds its weights"
        " itself while it loads them with --quantization int8, or int4 (quantization='int4' in"
        " Python)"
    )
