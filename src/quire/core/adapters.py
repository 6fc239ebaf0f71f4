"""LoRA adapters as requests name them: plain data, no weights.

An adapter is known by the digest of its content. Two names with equal content are one adapter, in
memory and in the prefix cache; a name whose content was replaced is another one.
"""

from dataclasses import dataclass
from typing import NamedTuple

from quire.errors import InvalidRequestError, shown

BASE_MODEL = ""
"""The digest of no adapter: the model as it is."""

NO_SLOT = -1
"""The slot of rows without an adapter."""

MAX_LORA_RANK = 256
MAX_LORAS = 1024
"""The most that the options take: of a rank, and of adapters in the memory that computes."""


class AdapterRef(NamedTuple):
    """An adapter that was found: its content, and where that is read again.

    name: for messages and results. path: the folder. digest: of the content, in hexadecimal.
    """

    name: str
    path: str
    digest: str


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """Which adapter a request is computed with, by vLLM's names and positions.

    lora_name: for people, in results and errors. lora_int_id: above 0; nothing here depends on it.
    lora_path: a folder as PEFT writes it, read when a request first names it, and again once its
    files have changed. Raises InvalidRequestError that names the field.
    """

    lora_name: str
    lora_int_id: int
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
