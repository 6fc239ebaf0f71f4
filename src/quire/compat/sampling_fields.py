"""Sampling parameters of other engines, with quire's alternatives; read by `checked_fields`.

The tables change when new releases of these engines change their parameters.
"""

from collections.abc import Mapping
from typing import Any

CompatTable = Mapping[str, tuple[tuple[Any, ...], str]]
"""Parameter's name -> the values that are accepted because they change nothing, and a sentence
about quire's alternative for all other values."""

_BEAMS = "use LLM.beam_search(prompts, BeamSearchParams(beam_width=...))"
_OFF = "switch enable_prefix_caching off, or give each prompt a cache_salt of its own"
_LOOPS = "repetition_penalty, presence_penalty and frequency_penalty discourage loops"
_WATERMARK = "texts are not watermarked"

COMPAT_SAMPLING: CompatTable = {
    "best_of": ((1,), "ask for n samples with logprobs=0 and keep the best by cumulative_logprob"),
    "early_stopping": ((False,), _BEAMS),
    "extra_args": (({},), "no part of quire reads further arguments"),
    "flat_logprobs": ((False,), "logprobs are a list with one map of tokens for each token"),
    "length_penalty": ((1, 1.0), _BEAMS),
    "logits_processors": (
        ([], ()),
        "no code of a request runs in the engine; use logit_bias, bad_words, allowed_token_ids or"
        " structured_outputs",
    ),
    "prompt_logprob_start": ((0,), "prompt_logprobs are those of the whole prompt"),
    "prompt_logprob_token_ids": (([],), "prompt_logprobs=N has each position's N best tokens"),
    "repetition_detection": ((), _LOOPS),
    "routed_experts_prompt_start": ((0,), "the experts of each token are not returned"),
    "skip_clone": ((True, False), "a copy is always taken"),
    "skip_reading_prefix_cache": ((False,), _OFF),
    "spaces_between_special_tokens": ((True, False), "no spaces are put between special tokens"),
    "stream_interval": ((1,), "a stream brings each token as it comes"),
    "thinking_token_budget": ((), "max_tokens bounds the whole answer"),
    "trace_decode_token_ids": (([],), "generated tokens can't be prescribed"),
    "use_beam_search": ((False,), _BEAMS),
    "watermarking": ((False,), _WATERMARK),
}

COMPAT_BEAMS: CompatTable = {
    "allowed_token_ids": ((), "a beam search chooses from the whole vocabulary"),
    "include_stop_str_in_output": ((False,), "a beam search has no stop strings"),
    "skip_special_tokens": ((True,), "tokens has them all; text leaves special tokens out"),
    "structured_outputs": ((), "a beam search obeys no grammar; use LLM.generate"),
    "watermarking": ((False,), _WATERMARK),
}
