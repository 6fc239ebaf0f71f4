"""Reads the quantization settings of config.json field by field.

An unknown field may change the weights, so it is refused, as in the rest of the config. Called by
the modules of the methods. Imports no torch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import CheckpointError, UnsupportedModelError, shown
from quire.hub.model_files import shown_name

ADVICE = (
    "name the original checkpoint, in bfloat16, float16 or float32: quire rounds its weights itself"
    " while it loads them with --quantization int8, or int4 (quantization='int4' in Python)"
)


_AUTO_ROUND = (
    *("act_data_type", "act_dynamic", "act_group_size", "act_sym", "amp", "enable_minmax_tuning"),
    *("enable_norm_bias_tuning", "provider", "scale_dtype", "seed", "train_bs"),
)
"""Fields that auto-round adds to the settings of any layout; they say how it computed weights."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """The quantization of a checkpoint's weights."""

    #: The method's name in messages, such as AWQ.
    method: str
    #: Warnings about settings that quire does not follow, each with the reason why that is
    #: harmless. The log shows the folder's name before each.
    remarks: tuple[str, ...] = ()
    #: Whether inputs of linears are rounded to int8, with one scale for each token.
    has_token_scales: bool = False


class SettingFields:
    """The fields of one object of the settings. Reading a field marks it as understood, and null
    means that it is not set."""

    def __init__(self, raw: Any, where: str) -> None:
        """Raises CheckpointError if `raw` is not an object."""
        if not isinstance(raw, Mapping):
            raise CheckpointError(f"{where} is {shown(raw)}, but must be an object")
        self._raw = raw
        #: The object's name in messages.
        self.where = where
        self._read: set[str] = set()

    def value(self, name: str) -> Any:
        """The field's value; None if it is absent or null."""
        self._read.add(name)
        return self._raw.get(name)

    def one_of(self, name: str, choices: Iterable[Any], default: Any = None) -> Any:
        """The field's value, or the default if it is not set. Raises UnsupportedModelError if the
        value is none of the choices."""
        value, choices = self.value(name), tuple(choices)
        if value is None and default is not None:
            return default
        if any(type(value) is type(choice) and value == choice for choice in choices):
            return value
        listed = ", ".join(map(str, choices))
        raise UnsupportedModelError(
            f"{self.where}: {name} is {shown(value)}, but quire reads only {listed}; {ADVICE}"
        )

    def size(self, name: str, default: int | None = None) -> int:
        """The field's value: a number of inputs, or -1 for all inputs."""
        value = self.value(name)
        value = default if value is None else value
        if type(value) is not int or (value != -1 and not 0 < value < 1 << 30):
            raise CheckpointError(
                f"{self.where}: {name} is {shown(value)}, but must be a number of inputs, or -1"
            )
        return value

    def ignore(self, *names: str) -> None:
        """Mark fields as read. They don't affect how the weights are read."""
        self._read.update(names)

    def ignore_auto_round(self) -> None:
        """Accept the fields that auto-round adds to a layout. Raises UnsupportedModelError if
        activations are rounded."""
        self.one_of("act_bits", (16, 32), 16)
        self.ignore(*_AUTO_ROUND)

    def finish(self) -> None:
        """Raises UnsupportedModelError for a field that is set and was not read."""
        for name, value in self._raw.items():
            if name not in self._read and value not in (None, False, {}, []):
                raise UnsupportedModelError(
                    f"{self.where}: the field {shown_name(str(name))} is {shown(value)}, which"
                    f" quire does not understand and which may change the weights; {ADVICE}"
                )
