"""What each field of a request's body means, in a line: for the OpenAPI document and /docs.

docs/api.md says more of some. Knows no body; `body` looks the notes up by name.
"""

from collections.abc import Mapping

NOTES: Mapping[str, str] = {
    "model": "the name in `/v1/models`",
    "stream": "the answer comes as server-sent events, piece by piece",
    "stream_options": "only with `stream`",
    "include_usage": "a last event without choices has the usage of the whole call",
    "continuous_usage_stats": "each event has the usage so far",
    "max_tokens": "the most tokens to generate for each choice",
    "max_completion_tokens": "the newer name of `max_tokens`",
    "n": "choices of each prompt",
    "temperature": "0 is greedy; where left out the model's own",
    "top_p": "sample among the likeliest tokens whose probabilities add up to it",
    "top_k": "sample among so many likeliest tokens; 0 or -1: all",
    "min_p": "sample among tokens at least so many times as likely as the likeliest",
    "presence_penalty": "subtracted from the logit of each token that was generated before",
    "frequency_penalty": "the same, times how often it was generated",
    "repetition_penalty": "divides the logits of tokens of prompt and answer; 1 changes nothing",
    "seed": "the same seed gives the same tokens, whatever runs beside it",
    "stop": "the text ends before the first of these",
    "logit_bias": "token id, as a string, to a number that is added to its logit",
    "user": "accepted; it changes no answer",
    "min_tokens": "before so many tokens nothing ends the answer but `max_tokens`",
    "ignore_eos": "the model's own end tokens don't end the answer",
    "stop_token_ids": "token ids that end the answer",
    "include_stop_str_in_output": "keep the stop string, or the text of the end token",
    "bad_words": "texts that are never generated",
    "allowed_token_ids": "only these are generated",
    "skip_special_tokens": "leave special tokens out of the text; true where left out",
    "prompt_logprobs": "log-probabilities of the prompt's tokens, and so many likeliest ones at "
    "each position; not streamed",
    "return_token_ids": "the answer has the token ids of prompt and choices",
    "priority": "smaller goes first, under the policy `priority`",
    "cache_salt": "cached prefixes are shared only with calls that have the same salt and key",
    "deadline_s": "seconds after which the call ends with an error",
    "use_beam_search": "the choices are the results of a beam search of width `n`, best first",
    "length_penalty": "with `use_beam_search`: exponent of the length by which scores are divided",
    "prompt": "a text, the token ids of one, or a list of either",
    "echo": "the prompt stands before the text",
    "best_of": "only where it equals `n`",
    "add_special_tokens": "false: a text gets no beginning-of-sequence token and the like",
    "messages": "objects with a `role`, a `content` and perhaps a `name`",
    "top_logprobs": "so many likeliest tokens at each position; with `logprobs` only",
    "chat_template_kwargs": "further variables of the model's chat template",
    "add_generation_prompt": "false: the prompt ends after the last message",
    "continue_final_message": "the answer goes on where the last message ends",
    "return_token_strs": "the text of each token, too",
    "tokens": "token ids",
    "CompletionRequest.logprobs": "the chosen token's log-probability, and those of so many "
    "likeliest ones, at each position",
    "ChatCompletionRequest.logprobs": "each token's log-probability and bytes",
    "ChatCompletionRequest.add_special_tokens": "true: the rendered messages get the tokenizer's "
    "special tokens, beside those of the template",
    "TokenizeRequest.prompt": "a text; or give `messages`",
    "TokenizeRequest.add_special_tokens": "where left out: true for a prompt, false for messages",
}
"""By the field's name, or by `Body.field` where bodies differ."""


def note_of(body: str, field: str) -> str | None:
    """The note of a body's field, if it has one."""
    return NOTES.get(f"{body}.{field}", NOTES.get(field))
