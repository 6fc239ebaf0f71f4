"""A count is what the same call is told that it had, always.

A few of the many calls that `benchmarks/clients/count_tokens.py` makes.
"""

import anthropic
import pytest
from benchmarks.clients.count_tokens import counted_and_billed, random_calls

NUM_CALLS = 40


@pytest.fixture
def talker(server, http):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_counted_is_billed(talker):
    calls = list(random_calls(7, NUM_CALLS))
    for name in ("tools", "system", "thinking", "tool_choice"):
        assert sum(name in call for call in calls) > 5
    for call in calls:
        counted, billed = counted_and_billed(talker, call)
        assert counted == billed > 0, call


def test_a_count_needs_no_max_tokens_and_takes_the_beta_s_path(talker, http):
    hello = [{"role": "user", "content": "Hello"}]
    body = {"messages": hello, "context_management": {"edits": []}, "max_tokens": 5}
    answer = http.post("/v1/messages/count_tokens?beta=true", json=body)
    assert answer.json() == {
        "input_tokens": talker.messages.count_tokens(model="embedded", messages=hello).input_tokens
    }
    assert answer.headers["x-ignored-fields"] == "context_management, max_tokens"
    beta = talker.beta.messages.count_tokens(model="embedded", messages=hello, betas=["x"])
    assert beta.input_tokens == answer.json()["input_tokens"]


def test_a_prompt_that_fits_no_context_is_counted(talker):
    long = [{"role": "user", "content": "import os\n" * 900}]
    assert talker.messages.count_tokens(model="embedded", messages=long).input_tokens > 1024


def test_mistakes_are_named(talker):
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        talker.messages.count_tokens(model="other", messages=[{"role": "user", "content": "a"}])
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.role is 'tool'"):
        talker.messages.count_tokens(model="embedded", messages=[{"role": "tool", "content": "a"}])
