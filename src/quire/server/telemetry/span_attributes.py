"""Converts a call's parameters and results to attributes of OpenTelemetry spans.

The names are from the semantic conventions for generative AI (`gen_ai.*`, version 1.37) or begin
with `quire.`. The values contain neither prompts nor generated text. Used by `monitor`.
"""

from collections.abc import Mapping, Sequence

from quire.core.request import Request

FIRST_TOKEN = "gen_ai.first_token"


def request_attributes(
    model_name: str, tenant: str, request_id: str, requests: Sequence[Request]
) -> dict[str, object]:
    """The attributes that are known when a call begins. They are read from its first request, since
    the others differ only in their prompts."""
    first = requests[0]
    params = first.params
    return {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
        "gen_ai.request.choice.count": first.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        # Seeds are written as text, since attributes are signed numbers of 64 bits.
        "gen_ai.request.seed": str(params.seed),
        "quire.num_prompts": len(requests),
        "quire.request_id": request_id,
        "quire.tenant": tenant or None,
    }


def result_attributes(
    num_prompt_tokens: int, num_generated_tokens: int, reasons: Mapping[str, int]
) -> dict[str, object]:
    """The attributes that are known when a call has ended. `reasons` has the number of generations
    by finish reason."""
    return {
        "gen_ai.usage.input_tokens": num_prompt_tokens,
        "gen_ai.usage.output_tokens": num_generated_tokens,
        "gen_ai.response.finish_reasons": [
            reason for reason, count in sorted(reasons.items()) for _ in range(count)
        ],
    }
