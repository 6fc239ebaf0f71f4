"""Prompts made of a trace: equal as far as their ids say, and no further."""

from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.traces.trace_cases import traces

from quire.errors import ConfigurationError
from quire.traces.tokens import PromptTokens
from quire.traces.trace import Trace, TraceRequest

MANY = 2**31
"""So many different tokens that none is drawn twice by chance."""


def common(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@settings(max_examples=20)
@given(traces(), st.integers(0, 7))
def test_prompts_share_what_their_ids_and_the_tail_say(trace: Trace, tail: int) -> None:
    trace = Trace(trace.block_tokens, trace.requests, tail)
    prompts = PromptTokens(trace, MANY)
    made = [prompts.prompt(number) for number in range(len(trace.requests))]
    for number, one in enumerate(trace.requests):
        assert len(made[number]) == one.num_prompt_tokens
        for other_number, other in enumerate(trace.requests[:number]):
            blocks = common(list(one.prefix_ids), list(other.prefix_ids))
            most = min(one.num_prompt_tokens, other.num_prompt_tokens)
            wanted = blocks * trace.block_tokens
            if blocks or one.tenant == other.tenant:
                wanted += tail
            assert common(made[number], made[other_number]) == min(wanted, most)


def test_tokens_are_within_bounds_and_a_function_of_the_seed() -> None:
    trace = Trace(8, (TraceRequest(0.0, 1000, 1, (3,)),))
    tokens = PromptTokens(trace, 100, first_token_id=90, seed=1).prompt(0)
    assert set(tokens) == set(range(90, 100))
    assert tokens == PromptTokens(trace, 100, 90, 1).prompt(0)
    assert tokens[:8] != PromptTokens(trace, 100, 90, 2).prompt(0)[:8]
    with pytest.raises(ConfigurationError, match="first_token_id is 99 and vocab_size 100"):
        PromptTokens(trace, 100, 99)
