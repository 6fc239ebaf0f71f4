"""What every body that asks for generated text has, whatever its API.

`answer` reads nothing else of a body. `body` has the fields of OpenAI's and vLLM's APIs; a body of
another API subclasses `CallBody` itself. Knows no engine.
"""

from abc import ABC, abstractmethod
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from quire.core.sampling_params import BeamSearchParams, SamplingParams
from quire.engine_client.inputs import MAX_NAME_LENGTH
from quire.server.generation.answer_defaults import AnswerDefaults
from quire.server.generation.chat_call import ChatCall
from quire.server.http.body import Body
from quire.server.limits import CallLimits

# What fits the messages between the processes; SamplingParams has the bounds that mean something.
Count = Annotated[int, Field(lt=2**31)]
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]

HINTS = frozenset(
    {
        "cache_control",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "verbosity",
    }
)
"""Fields of others' APIs that change no token, and on which no caller relies. All bodies that ask
for generated text take them; an API where one of them means something has it as a field."""

# At the first wrong element: a list may have millions.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


def left_out(**schema: Any) -> Any:
    """A field that is None where it was left out.

    schema: what the OpenAPI document says of its values, which are checked elsewhere.
    """
    return Field(default=None, json_schema_extra=schema)


class Params(NamedTuple):
    """What a body asks for. beams: of a beam search, of which `sampling` is then made."""

    sampling: SamplingParams
    beams: BeamSearchParams | None = None


class CallBody(Body, ABC):
    """A body that asks for generated text.

    deadline_s: seconds from its arrival after which the call is ended with an error.
    """

    model: str | None = None
    stream: bool = False
    # ours
    priority: Priority = 0
    cache_salt: str | None = left_out(maxLength=MAX_NAME_LENGTH)
    deadline_s: Seconds | None = None

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with an event for the usage of the whole call."""
        return False

    @property
    def continuous_usage(self) -> bool:
        """Whether each event of a stream has the usage so far."""
        return False

    @property
    def labels(self) -> list[str]:
        """Names of fields inside of the body's objects that change nothing in the answer."""
        return []

    @property
    def format_field(self) -> str:
        """The field that says what the answer must look like, for errors."""
        return "structured_outputs"

    @property
    def gives_token_ids(self) -> bool:
        """Whether the answer has the token ids of prompts and choices."""
        return False

    def adopt(self, defaults: AnswerDefaults) -> None:
        """Ask for what the server has every answer have."""

    def check_amounts(self, limits: CallLimits, max_logprobs: int) -> None:
        """Check how much is asked for. max_logprobs: the engine's bound.

        Raises InvalidRequestError that names the field and the bound.
        """

    @abstractmethod
    def to_params(self) -> Params:
        """What the body asks for, its defaults filled in. Raises InvalidRequestError."""


class ChatBody(CallBody, ABC):
    """A body that asks for an assistant's message.

    Its `to_params` leaves out structured_outputs, which are the chat call's `answer_format`: what
    the whole answer obeys depends on tools and reasoning, too.
    """

    @abstractmethod
    def to_chat_call(self) -> ChatCall:
        """The messages and what goes with them. Raises InvalidRequestError."""
