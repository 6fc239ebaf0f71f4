"""The registry of weight formats, without torch.

Holds the formats' names and descriptions, and the option that chooses a format.

To add a format, add its file and a line in `WEIGHT_FORMATS`. The command line, the options, `quire
doctor` and the memory plan read names and sizes here; the classes are loaded when an engine is
built.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.option_fields import Flag, OneOf, Options, option
from quire.registry import Registry, imported

if TYPE_CHECKING:
    from quire.formats.weight_format import WeightFormat

BFLOAT16_BITS = 16

# Share of a model's bytes in its linears. The rest (the embedding's table) is not quantized.
_LINEAR_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class WeightFormatEntry:
    """A format's description, size and class, available without loading the class."""

    #: Completes "rounds weights to NAME, with ...".
    description: str

    #: Number of bits per weight in a large linear, scales included.
    bits: float

    #: The `WeightFormat` as "module:Class", or the class itself.
    home: "str | Callable[[], WeightFormat]"

    @property
    def saved_share(self) -> float:
        """Fraction of a bfloat16 model's bytes that the format saves, rounded down to tenths."""
        return int(10 * _LINEAR_SHARE * (1 - self.bits / BFLOAT16_BITS)) / 10


WEIGHT_FORMATS: Registry[WeightFormatEntry] = Registry(
    "quantization",
    {
        "int8": WeightFormatEntry(
            "a scale per output, over rotated inputs", 8, "quire.formats.int8:Int8"
        ),
        "int4": WeightFormatEntry("a scale per group of 32 inputs", 4.5, "quire.formats.int4:Int4"),
    },
)

_DENSE = WeightFormatEntry("nothing is rounded", BFLOAT16_BITS, "quire.formats.dense:Dense")


def weight_formats() -> dict[str, WeightFormatEntry]:
    """The entries by name, from the largest weights to the smallest."""
    return dict(sorted(WEIGHT_FORMATS.items(), key=lambda item: -item[1].bits))


@dataclass(frozen=True)
class FormatOptions(Options):
    """The option for the format of the weights."""

    quantization: str | None = option(
        None,
        OneOf(
            WEIGHT_FORMATS,
            advice="a model that is stored in AWQ, GPTQ, FP8, MXFP4 or GGUF is served as it is,"
            " so leave this option out for it",
        ),
        group="model",
        help="round weights to {names} while loading",
        doc="rounds the weights of linear layers during loading, from any checkpoint: "
        + ", or ".join(f"to {name}, with {e.description}" for name, e in weight_formats().items())
        + ". In both, activations are rounded to eight bits, with a scale per 256 or 128 inputs."
        " Norms, biases and the embedding are not rounded. None: no weights are rounded.",
        flag=Flag(shown="none"),
    )


def load_weight_format(name: str | None) -> "WeightFormat":
    """Load a format's class, which imports torch. None means weights in the model's own dtype.

    Raises ConfigurationError for a name that is not registered.
    """
    home = (_DENSE if name is None else WEIGHT_FORMATS.get(name)).home
    weight_format: WeightFormat = (imported(home) if isinstance(home, str) else home)()
    return weight_format
