"""The registry of KV formats, without torch: their names, and the backends that read them.

To add a format, add its file and a line in `KV_FORMATS`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.errors import ConfigurationError
from quire.registry import Registry, imported

if TYPE_CHECKING:
    import torch

    from quire.attention.kv_format import KVFormat

AUTO, INT8 = "auto", "int8"


@dataclass(frozen=True, slots=True)
class KVFormatEntry:
    """A format and its readers, available without loading the format."""

    #: The `KVFormat` as "module:NAME", or the object; None is the plain one of the model's dtype.
    home: "str | KVFormat | None"
    #: The names of the attention backends that read the format; None means all.
    backends: frozenset[str] | None
    #: Ends the refusal of a backend that doesn't read the format, such as "; choose int8".
    advice: str = ""


KV_FORMATS: Registry[KVFormatEntry] = Registry(
    "KV format",
    {
        AUTO: KVFormatEntry(None, None),
        INT8: KVFormatEntry(
            "quire.attention.quantized_kv:INT8", frozenset({"native", "triton", "torch"})
        ),
        "fp8": KVFormatEntry(
            "quire.attention.quantized_kv:FP8",
            frozenset({"triton"}),
            "; 'int8' takes as many bytes and is more exact",
        ),
        "int4": KVFormatEntry(
            "quire.attention.int4_kv:INT4",
            frozenset(),
            ": of 14 formats of 4 bits none keeps the quality: the best of 5 bits an element costs"
            " 0.9% of perplexity on ordinary keys, 3% to 25% on keys with outliers, such as biases"
            " make; int8 costs 0.02% (`quire bench perplexity --kv-cache-dtype int8 int4` measures"
            " yours)",
        ),
    },
    # AUTO's formats have these names, by which backends choose their kernels.
    reserved=dict.fromkeys(("float32", "bfloat16", "float16", "float64"), "a dtype"),
)
"""KV formats by name, as `kv_cache_dtype` takes them."""


def load_kv_format(name: str, dtype: "torch.dtype") -> "KVFormat":
    """The format that is registered as `name`. `dtype` is the model's. Imports torch."""
    from quire.attention.kv_format import KVFormat  # imports torch

    found = KV_FORMATS.get(name).home
    if isinstance(found, str):
        found = imported(found)
    if found is None:
        return KVFormat.plain(dtype)
    if not isinstance(found, KVFormat) or found.name != name:
        raise ConfigurationError(f"KV format {name!r} is registered as {found!r}; give it its name")
    return found
