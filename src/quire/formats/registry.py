"""The registry of weight formats, without torch.

Holds the formats' names and descriptions, and the option that chooses a format.

To add a format, add its file and a line in `_FORMATS`; code outside the package calls
`register_weight_format`. The command line, the options, `quire doctor` and the memory plan read
names and sizes here; the classes are loaded when an engine is built.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from quire.errors import ConfigurationError
from quire.option_fields import Flag, OneOf, Options, option

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


_FORMATS: dict[str, WeightFormatEntry] = {
    "int8": WeightFormatEntry(
        "a scale per output, over rotated inputs", 8, "quire.formats.int8:Int8"
    ),
    "int4": WeightFormatEntry("a scale per group of 32 inputs", 4.5, "quire.formats.int4:Int4"),
}

_DENSE = WeightFormatEntry("nothing is rounded", BFLOAT16_BITS, "quire.formats.dense:Dense")


def weight_format_names() -> tuple[str, ...]:
    """The values of the option `quantization`, except None."""
    return tuple(_FORMATS)


def weight_formats() -> dict[str, WeightFormatEntry]:
    """The entries by name, from the largest weights to the smallest."""
    return dict(sorted(_FORMATS.items(), key=lambda item: -item[1].bits))


@dataclass(frozen=True)
class FormatOptions(Options):
    """The option for the format of the weights."""

    quantization: str | None = option(
        None,
        OneOf(weight_format_names),
        group="model",
        help="round weights to {names} while loading",
        doc="rounds the weights of linear layers during loading, from any checkpoint: "
        + ", or ".join(f"to {name}, with {e.description}" for name, e in weight_formats().items())
        + ". Both multiply with activations of eight bits, with a scale per 256 or 128 inputs."
        " Norms, biases and the embedding are not rounded. None: nothing is.",
        flag=Flag(shown="none"),
    )


def load_weight_format(name: str | None) -> "WeightFormat":
    """Load a format's class, which imports torch. None means weights in the model's own dtype.

    Raises ConfigurationError for a name that is not registered.
    """
    entry = _DENSE if name is None else _FORMATS.get(name)
    if entry is None:
        raise ConfigurationError(
            f"quantization is {name!r}, but must be None or one of {weight_format_names()}"
        )
    home = entry.home
    if isinstance(home, str):
        module, _, kind = home.partition(":")
        home = getattr(import_module(module), kind)
    weight_format: WeightFormat = home()
    return weight_format


def register_weight_format(name: str, entry: WeightFormatEntry) -> None:
    """Register a format from outside the package as `quantization=name`, for this process.

    Raises ValueError if another format has this name.
    """
    if _FORMATS.get(name, entry) != entry:
        raise ValueError(f"there is a weight format {name!r} already; choose another name")
    _FORMATS[name] = entry
