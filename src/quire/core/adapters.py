"""Plain data that names LoRA adapters: references, digests and bounds; no weights.

An adapter is identified by the digest of its content. Two names with equal content share one copy
in memory and their entries in the prefix cache. If the weights behind a name are replaced, the name
stands for a new adapter.
"""

from dataclasses import dataclass
from typing import NamedTuple

from quire.errors import InvalidRequestError, shown

BASE_MODEL = ""
"""The digest of sequences without an adapter."""

NO_SLOT = -1
"""The slot of rows without an adapter."""

MAX_LORA_RANK = 256
MAX_LORAS = 1024
"""The upper bounds of the options max_lora_rank and max_loras."""


class AdapterRef(NamedTuple):
    """Reference to an adapter on disk: its name, folder and digest."""

    #: Name shown in messages and results.
    name: str
    #: Folder of the adapter.
    path: str
    #: Digest of the content, in hexadecimal.
    digest: str


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The adapter for one request, with vLLM's field names and positions.

    Raises InvalidRequestError that names the field.
    """

    #: Name shown to people in results and errors.
    lora_name: str
    #: vLLM's id of the adapter, a number above 0. quire does not use the id.
    lora_int_id: int
    #: Folder in PEFT's format. The engine reads it when a request first names it, and again after
    #: its files have changed.
    lora_path: str

    def __post_init__(self) -> None:
        for field in ("lora_name", "lora_path"):
            value: object = getattr(self, field)
            if not isinstance(value, str) or not value:
                raise InvalidRequestError(
                    f"{field} is {shown(value)}, but must be a text that is not empty", field
                )
        number: object = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise InvalidRequestError(
                f"lora_int_id is {shown(number)}, but must be a whole number above 0", "lora_int_id"
            )

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path
