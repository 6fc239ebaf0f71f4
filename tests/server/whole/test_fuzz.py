"""Whatever JSON comes in: an answer or an error in OpenAI's shape, and never a failed server."""

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.server.routes.openai.chat_body import ChatCompletionRequest
from quire.server.routes.openai.completions import CompletionRequest

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 30)
    | st.floats()
    | st.floats(0, 2)
    | st.text(max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=6) | st.just("7"), inner, max_size=3)
    ),
    max_leaves=6,
)
PROMPTS = st.sampled_from(["hello", [5, 6], ["a", "b"], [[1], [2, 3]]]) | VALUES
MESSAGES = VALUES | st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool"]) | SCALARS},
        optional={"content": st.text(max_size=8) | VALUES, "name": VALUES, "tool_calls": VALUES},
    ),
    max_size=3,
)
OPENAI_NAMES = [*ChatCompletionRequest.not_supported, "best_of", "suffix", "nonsense"]
FIXED_NAMES = ["deadline_s", "max_tokens", "model", "n"]


def bodies(model, first_name, first_value):
    """Bodies with a few fields of any value, and short answers where nothing else is said."""
    names = sorted({*model.model_fields, *OPENAI_NAMES} - {first_name, *FIXED_NAMES})
    return st.builds(
        lambda value, fields: {"max_tokens": 2} | fields | {first_name: value},
        first_value,
        st.dictionaries(st.sampled_from(names), VALUES, max_size=3),
    )


def check(server, path, body):
    content = json.dumps(body)  # with NaN and lone surrogates, as Python's clients send them
    headers = {"Content-Type": "application/json"}
    answer = server.http.post(path, content=content, headers=headers)
    if answer.status_code == 200:
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert answer.text.endswith("data: [DONE]\n\n")
            assert '"error"' not in answer.text
        else:
            assert answer.json()["usage"]["completion_tokens"] >= 1
        return
    assert answer.status_code in (400, 422), answer.text
    assert answer.json()["error"]["message"]


SETTINGS = settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@SETTINGS
@given(body=bodies(CompletionRequest, "prompt", PROMPTS) | VALUES)
def test_completions(server, body):
    check(server, "/v1/completions", body)


@SETTINGS
@given(body=bodies(ChatCompletionRequest, "messages", MESSAGES) | VALUES)
def test_chat_completions(server, body):
    check(server, "/v1/chat/completions", body)
