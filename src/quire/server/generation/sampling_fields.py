"""The sampling parameters that the request bodies of several APIs share.

Types are checked here, values by `SamplingParams`. Independent of the engine.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from quire.server.generation.call_body import (
    TOKEN_IDS,
    WORDS,
    Count,
    Texts,
    TokenIds,
    bounded,
    left_out,
)
from quire.server.http.body import Body


class ChoiceFields(Body):
    """The sampling parameters that OpenAI's, vLLM's and Anthropic's APIs share."""

    notes: ClassVar[Mapping[str, str]] = {
        "temperature": "0 is greedy; where left out the model's own",
        "top_p": "sample among the likeliest tokens whose probabilities add up to it; 0 is greedy",
        "top_k": "sample among this many likeliest tokens; 0 or -1: all",
        "min_p": "sample among tokens at least this fraction as likely as the likeliest",
        "seed": "the same seed gives the same tokens, whatever runs beside it",
    }

    temperature: float | None = bounded("temperature")
    top_p: float | None = bounded("top_p")
    seed: int | None = bounded("seed")
    # extensions to OpenAI's API
    top_k: Count | None = bounded("top_k")
    min_p: float | None = bounded("min_p")

    def given(self, names: Iterable[str]) -> dict[str, Any]:
        """The named fields and their values, without fields that were left out."""
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


class SamplingFields(ChoiceFields):
    """The sampling parameters that completions, chats and responses share."""

    list_bounds: ClassVar[Mapping[str, str]] = {
        "stop": "max_stop_strings",
        "stop_token_ids": "max_list_length",
    }
    notes: ClassVar[Mapping[str, str]] = {
        "presence_penalty": "subtracted from the logit of each token that was generated before",
        "frequency_penalty": "the same, times how often it was generated",
        "repetition_penalty": "divides the logits of tokens of prompt and answer; 1 changes "
        "nothing",
        "stop": "the text ends before the first of these",
        "stop_token_ids": "token ids that end the answer",
        "min_tokens": "before this many tokens nothing ends the answer but the limit of tokens",
        "ignore_eos": "the model's own end tokens don't end the answer",
    }

    presence_penalty: float | None = bounded("presence_penalty")
    frequency_penalty: float | None = bounded("frequency_penalty")
    stop: str | Texts | None = left_out(minLength=1, **WORDS)
    # extensions to OpenAI's API
    repetition_penalty: float | None = bounded("repetition_penalty")
    stop_token_ids: TokenIds | None = left_out(**TOKEN_IDS)
    min_tokens: Count | None = bounded("min_tokens")
    ignore_eos: bool | None = None
