"""Engine options for LoRA adapters; `options.engine_options` joins them with the other options."""

from dataclasses import dataclass

from quire.core.adapters import MAX_LORA_RANK, MAX_LORAS
from quire.errors import ConfigurationError
from quire.option_fields import Flag, Options, Switch, Whole, option

DEFAULT_MAX_LORAS = 8
DEFAULT_MAX_LORA_RANK = 16
CPU_LORAS_PER_SLOT = 4


@dataclass(frozen=True)
class AdapterOptions(Options):
    """Whether requests may use LoRA adapters, and how much memory the adapters get."""

    enable_lora: bool = option(
        False,
        Switch(),
        group="adapters",
        help="serve LoRA adapters, which requests name",
        doc="serve LoRA adapters, which requests name (lora_request); see docs/adapters.md.",
    )
    max_loras: int | None = option(
        None,
        Whole(1, MAX_LORAS),
        group="adapters",
        help="adapters that one step may use; each has a slot in the device's memory",
        doc="adapters that one step may use. Each has a slot in the device's memory, which is"
        f" allocated at the start. None: {DEFAULT_MAX_LORAS}, with enable_lora.",
        flag=Flag(shown=str(DEFAULT_MAX_LORAS)),
    )
    max_lora_rank: int | None = option(
        None,
        Whole(1, MAX_LORA_RANK),
        group="adapters",
        help=f"highest rank of an adapter, up to {MAX_LORA_RANK}; slots have its size",
        doc=f"the highest rank of an adapter, from 1 to {MAX_LORA_RANK}; each slot has its size."
        f" None: {DEFAULT_MAX_LORA_RANK}, with enable_lora.",
        flag=Flag(shown=str(DEFAULT_MAX_LORA_RANK)),
    )
    max_cpu_loras: int | None = option(
        None,
        Whole(1),
        group="adapters",
        help="adapters kept in the host's memory; others are read from their folders again",
        doc="adapters that are kept in the host's memory, those that were used last; others are"
        f" read from their folders again. At least max_loras. None: {CPU_LORAS_PER_SLOT} times"
        " max_loras, with enable_lora.",
        flag=Flag(shown=f"{CPU_LORAS_PER_SLOT} times --max-loras"),
    )

    @property
    def num_lora_slots(self) -> int:
        """Number of adapter slots: max_loras or its default; 0 without enable_lora."""
        return (self.max_loras or DEFAULT_MAX_LORAS) if self.enable_lora else 0

    @property
    def lora_rank(self) -> int:
        """Largest rank that an adapter may have: max_lora_rank or its default."""
        return self.max_lora_rank or DEFAULT_MAX_LORA_RANK

    @property
    def num_cpu_loras(self) -> int:
        """Number of adapters kept in host memory: max_cpu_loras or its default."""
        return self.max_cpu_loras or CPU_LORAS_PER_SLOT * self.num_lora_slots

    def _check_together(self) -> None:
        super()._check_together()
        if not self.enable_lora:
            # max_lora_rank is accepted without enable_lora, because scripts often pass it anyway.
            for name in ("max_loras", "max_cpu_loras"):
                if getattr(self, name) is not None:
                    raise ConfigurationError(
                        f"{name} is {getattr(self, name)}, but adapters are not served; set"
                        " enable_lora, or leave it out"
                    )
        elif self.num_cpu_loras < self.num_lora_slots:
            raise ConfigurationError(
                f"max_cpu_loras is {self.max_cpu_loras}, but must be at least max_loras,"
                f" {self.num_lora_slots}"
            )
