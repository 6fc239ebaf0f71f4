"""Random requests for `law`: every option of sampling, beside prefixes, tenants and adapters."""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.speculation.law_models import FIRST_TOKEN, VOCAB_SIZE
from quire import LoRARequest, SamplingParams, StructuredOutputsParams

MAX_PROMPT_TOKENS, MAX_OUTPUT_TOKENS = 100, 48
TEXTS = ("import os\n", "def f(x):\n    return ", "# a\n", "class A:", "x = 1\nx = 1\nx =", "for i")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
END_OF_THOUGHT = 50
"""A token that ends the reasoning in THOUGHT."""

THOUGHT = (
    f"start: <[{FIRST_TOKEN}-{END_OF_THOUGHT - 1},{END_OF_THOUGHT + 1}-{VOCAB_SIZE - 1}]>{{0,6}}"
    f" <[{END_OF_THOUGHT}]> /[a-z ]{{1,20}}/"
)
"""Reasoning of at most six tokens, then an answer: the form of a budget for reasoning."""

FORMS: tuple[dict[str, Any], ...] = (
    {"json": SCHEMA, "disable_any_whitespace": True},
    {"json": SCHEMA},
    {"json_object": True, "disable_any_whitespace": True},
    {"regex": "(def|class) [a-z]{2,6}:"},
    {"regex": r"([a-z]{2,5} = \d+\n){2,9}"},
    {"choice": ["yes", "no", "no, never"]},
    {"grammar": 'start: "[" WORD ("," WORD)~3 "]"\nWORD: /[a-z]{1,4}/'},
    {"grammar": THOUGHT},
)


class Wish(NamedTuple):
    """One request."""

    prompt: dict[str, Any]
    params: SamplingParams
    adapter: LoRARequest | None


def draw_crowd(
    rng: random.Random, num_requests: int, adapters: Sequence[LoRARequest]
) -> list[Wish]:
    """Requests. Some of them have a prefix in common. Each has a seed of its own."""
    shared = _tokens(rng, rng.randrange(10, 70))
    seeds = rng.sample(range(1 << 30), num_requests)
    crowd = []
    for seed in seeds:
        prompt: dict[str, Any] = {"prompt_token_ids": _prompt(rng, shared)}
        if rng.random() < 0.15:
            prompt = {"prompt": rng.choice(TEXTS)}
        if rng.random() < 0.2:
            prompt["tenant"] = rng.choice("ab")
        if rng.random() < 0.1:
            prompt["cache_salt"] = rng.choice("xy")
        adapter = rng.choice([None, *adapters]) if adapters else None
        crowd.append(Wish(prompt, draw_params(rng, seed), adapter))
    return crowd


def draw_params(rng: random.Random, seed: int) -> SamplingParams:
    """Any mix of the options of sampling that are allowed together."""

    def sometimes(rate: float, value: Any, otherwise: Any = None) -> Any:
        return value if rng.random() < rate else otherwise

    max_tokens = rng.randrange(1, MAX_OUTPUT_TOKENS)
    listed = sometimes(0.05, rng.sample(range(VOCAB_SIZE), 3))
    form = sometimes(0.2, rng.choice(FORMS))
    return SamplingParams(
        n=sometimes(0.25, rng.choice((2, 3)), 1),
        temperature=rng.choice((0.0, 0.0, 0.3, 1.0, 2.0)),
        top_p=sometimes(0.3, rng.choice((0.5, 0.9))),
        top_k=sometimes(0.3, rng.choice((1, 2, 5, 40))),
        min_p=sometimes(0.2, 0.05),
        presence_penalty=sometimes(0.2, 0.5, 0.0),
        frequency_penalty=sometimes(0.2, 0.3, 0.0),
        repetition_penalty=sometimes(0.2, 1.2),
        seed=seed,
        stop=sometimes(0.2, rng.choice(("self", "e", ["in", "\n"], ["or", "=", "x"]))),
        stop_token_ids=sometimes(0.1, _tokens(rng, 200)),
        include_stop_str_in_output=rng.random() < 0.5,
        ignore_eos=rng.random() < 0.5,
        max_tokens=max_tokens,
        min_tokens=sometimes(0.2, rng.randrange(max_tokens + 1), 0),
        logprobs=None if listed else sometimes(0.4, rng.choice((0, 1, 3))),
        logprob_token_ids=listed,
        prompt_logprobs=sometimes(0.15, rng.choice((0, 2))),
        logit_bias=sometimes(0.15, {token: rng.uniform(-8, 8) for token in _tokens(rng, 5)}),
        bad_words=sometimes(0.15, rng.choice((["self"], ["return", "a", "import os"]))),
        allowed_token_ids=None if form else sometimes(0.15, _tokens(rng, rng.choice((2, 4, 300)))),
        skip_special_tokens=rng.random() < 0.7,
        structured_outputs=form and StructuredOutputsParams(**form),
    )


def _prompt(rng: random.Random, shared: list[int]) -> list[int]:
    """Tokens that often begin with the shared ones, or repeat a few."""
    kind = rng.randrange(4)
    if kind == 0:
        return (_tokens(rng, rng.randrange(1, 9)) * 20)[: rng.randrange(1, MAX_PROMPT_TOKENS)]
    own = _tokens(rng, rng.randrange(1, MAX_PROMPT_TOKENS - len(shared)))
    if kind == 1:
        return own
    return shared[: rng.choice((len(shared), rng.randrange(1, len(shared))))] + own


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_TOKEN, VOCAB_SIZE) for _ in range(count)]
