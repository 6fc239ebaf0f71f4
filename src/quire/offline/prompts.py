"""Types of prompts that are mappings; `engine_client.inputs` reads them."""

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt as text. The keys without a comment are fields of `RequestOptions`."""

    prompt: str
    #: Images as {"image": picture} or {"image": [picture, ...]}, one for each placeholder.
    multi_modal_data: NotRequired[Mapping[str, Any]]
    #: vLLM's names of the images as {"image": name}, which change nothing.
    multi_modal_uuids: NotRequired[Mapping[str, Any]]
    #: Settings of the image processor that replace those of the call and of the model.
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]
    #: The text, or the token ids, that the caller expects to get: a source of draft tokens. It
    #: changes no output.
    prediction: NotRequired[str | Sequence[int]]
    priority: NotRequired[int]
    tenant: NotRequired[str]
    cache_salt: NotRequired[str]
    deadline_s: NotRequired[float]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    #: The prompt's text, which is ignored.
    prompt: NotRequired[str]
    #: As in TextPrompt.
    multi_modal_data: NotRequired[Mapping[str, Any]]
    #: As in TextPrompt.
    multi_modal_uuids: NotRequired[Mapping[str, Any]]
    #: As in TextPrompt.
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]
    #: As in TextPrompt.
    prediction: NotRequired[str | Sequence[int]]
    priority: NotRequired[int]
    tenant: NotRequired[str]
    cache_salt: NotRequired[str]
    deadline_s: NotRequired[float]
