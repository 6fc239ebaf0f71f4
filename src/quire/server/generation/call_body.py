"""The fields that the request bodies of all text generation APIs have.

`answer` reads no other field of a body. `body` has the fields of OpenAI's and vLLM's APIs; a body
of another API subclasses `CallBody` directly. Independent of the engine.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from quire.core.sampling_params import BOUNDS, MAX_TOKENS, BeamSearchParams, SamplingParams
from quire.engine_client.inputs import MAX_NAME_LENGTH
from quire.server.generation.answer_defaults import AnswerDefaults
from quire.server.generation.chat_call import ChatCall
from quire.server.http.body import Body
from quire.server.limits import CallLimits

# Integers that fit the messages to the engine process. SamplingParams checks narrower bounds.
Count = Annotated[int, Field(lt=MAX_TOKENS + 1)]
#: A limit of generated tokens.
MaxTokens = Annotated[int, Field(ge=BOUNDS["max_tokens"].low, lt=MAX_TOKENS + 1)]
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
"""Fields of other APIs that change no token and that callers do not rely on. Bodies for generated
text ignore them. An API in which such a field has a meaning declares the field."""

# Validation stops at the first wrong element, since a list may have millions.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]

TOKEN_IDS: Mapping[str, Any] = {"items": {"type": "integer", "minimum": 0}}
"""Schema of a list of token ids."""
WORDS: Mapping[str, Any] = {"items": {"type": "string", "minLength": 1}}
"""Schema of a list of texts that are not empty."""


def left_out(**schema: Any) -> Any:
    """A field whose default is None. `schema` describes its values in the OpenAPI document but does
    not check them."""
    return Field(default=None, json_schema_extra=schema)


def bounded(name: str) -> Any:
    """A field whose default is None. The schema has the bounds of SamplingParams' parameter `name`,
    except MAX_TOKENS, which the field's type, `Count`, already sets."""
    schema = BOUNDS[name].schema()
    return left_out(**{key: bound for key, bound in schema.items() if bound != MAX_TOKENS})


class Params(NamedTuple):
    """The sampling params that a body asks for."""

    sampling: SamplingParams
    #: Params of a beam search, from which `sampling` was made; None without a beam search.
    beams: BeamSearchParams | None = None


class CallBody(Body, ABC):
    """A body that asks for generated text."""

    model: str | None = None
    stream: bool = False
    # extensions to OpenAI's API
    priority: Priority = 0
    cache_salt: str | None = left_out(maxLength=MAX_NAME_LENGTH)
    #: Seconds after the call's arrival at which it ends with an error; None means the server's
    #: default.
    deadline_s: Seconds | None = None
    #: Whether drafts may come from the caller's earlier answers, and this answer is kept for
    #: drafts; see `RequestOptions`.
    speculation_history: bool = True

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with an event that has the usage of the whole call."""
        return False

    @property
    def continuous_usage(self) -> bool:
        """Whether each event of a stream has the usage so far."""
        return False

    @property
    def labels(self) -> list[str]:
        """Names of nested fields of the body that have no effect on the answer."""
        return []

    @property
    def format_field(self) -> str:
        """Name of the field that constrains the answer's form, for error messages."""
        return "structured_outputs"

    @property
    def gives_token_ids(self) -> bool:
        """Whether the answer has the token ids of prompts and choices."""
        return False

    def adopt(self, defaults: AnswerDefaults) -> None:
        """Change the fields according to the operator's settings."""

    def check_amounts(self, limits: CallLimits, max_logprobs: int) -> None:
        """Check numbers in the body, such as n and logprobs, against the server's `limits` and the
        engine's `max_logprobs`. Raises InvalidRequestError that names the field and the bound."""

    @abstractmethod
    def to_params(self) -> Params:
        """The params that the body asks for, with defaults. Raises InvalidRequestError."""


class ChatBody(CallBody, ABC):
    """A body that asks for an assistant's message.

    `to_params` does not set structured_outputs. The server derives them later, from the
    `answer_format` of `to_chat_call` and the format of tool calls and reasoning.
    """

    @abstractmethod
    def to_chat_call(self, *, takes_images: bool = False) -> ChatCall:
        """The messages and their options. takes_images: whether the model takes images, which are
        refused otherwise. Raises InvalidRequestError."""
