"""A model that thinks: budgets, switches and calls in all APIs, and kill -9 of its engine."""

import asyncio
import json
import os
import signal

import httpx
import pytest
from tests.server.launching import WAIT_S, launched
from tests.server.thinking_folder import make_thinking_tokenizer

OPTIONS = {"num_blocks": 256, "max_num_seqs": 8, "max_model_len": 512}
NUMBERS = {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 40, "maxItems": 40}
SCHEMA = {"type": "object", "properties": {"n": NUMBERS}, "required": ["n"]}
TOOLS = [{"name": "count", "input_schema": SCHEMA}]
QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]
BODY = {"messages": QUESTION, "max_tokens": 100, "temperature": 1.0, "stream": True}
BUDGET = 24
BODIES = [
    BODY | {"seed": 3, "stop_sequences": ["xyzzy"]},
    BODY | {"seed": 4, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    BODY | {"seed": 5, "tools": TOOLS, "tool_choice": {"type": "any"}},
    BODY | {"seed": 6, "thinking": {"type": "enabled", "budget_tokens": BUDGET}},
]


@pytest.fixture(scope="module")
def marks(tmp_path_factory):
    """The ids of the marks, and the folder of a tokenizer that has them."""
    folder = tmp_path_factory.mktemp("thinking")
    return make_thinking_tokenizer(folder), folder


@pytest.fixture(scope="module")
def server(marks):
    with launched(OPTIONS | {"tokenizer": str(marks[1])}) as running:
        yield running


async def ask(client, body, seen):
    """Thinking, and text or arguments, and why it ended with which usage; `seen` counts pieces."""
    thoughts, text, end = "", "", None
    async with client.stream("POST", "/v1/messages", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            data = json.loads(line[6:]) if line.startswith("data: ") else {}
            assert data.get("type") != "error", data
            if data.get("type") == "content_block_delta":
                delta = data["delta"]
                thoughts += delta.get("thinking", "")
                text += delta.get("text", "") + delta.get("partial_json", "")
                seen.append(body["seed"])
            if data.get("type") == "message_delta":
                usage = data["usage"]
                num_thoughts = usage["output_tokens_details"]["thinking_tokens"]
                end = (data["delta"]["stop_reason"], usage["output_tokens"], num_thoughts)
    return thoughts, text, end


async def ask_all(server, kill_after=None):
    seen = []
    async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S) as client:
        asked = asyncio.gather(*(ask(client, body, seen) for body in BODIES))
        if kill_after is not None:
            while len(seen) < kill_after:
                await asyncio.sleep(0.001)
            os.kill(server.current_engine().pid, signal.SIGKILL)
        return await asked


def test_messages_outlive_the_engine(server):
    expected = asyncio.run(ask_all(server))
    assert asyncio.run(ask_all(server, kill_after=6)) == expected
    server.wait_for_restarts(1)
    assert expected[1][1].lstrip().startswith("{") and expected[1][2][1] > 40
    assert expected[2][1].lstrip().startswith('{"n') and expected[2][2][1] > 40
    thoughts, text, (_, num_tokens, num_thoughts) = expected[3]
    assert thoughts and text and 0 < num_thoughts <= BUDGET < num_tokens
    assert not any(thoughts for thoughts, *_ in expected[:3]), "which did not ask for it"


def chat(server, **body):
    body = {"messages": QUESTION, "max_tokens": 40, "return_token_ids": True} | body
    answer = server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("budget", [0, 1, 17, 60])
def test_reasoning_ends_at_its_budget_and_the_answer_follows(server, marks, budget):
    ids, _ = marks
    found = chat(server, thinking_token_budget=budget, seed=budget, ignore_eos=True)
    (choice,) = found["choices"]
    token_ids, usage = choice["token_ids"], found["usage"]
    assert (
        len(token_ids) == usage["completion_tokens"] == 40 and choice["finish_reason"] == "length"
    )
    num_reasoned = usage["completion_tokens_details"]["reasoning_tokens"]
    if budget > 40:  # cut off in it
        assert ids["</think>"] not in token_ids and not choice["message"]["content"]
        return
    assert token_ids.index(ids["</think>"]) == budget
    # The white space beside marks is none of the reasoning's text.
    assert budget - 2 <= num_reasoned <= budget
    assert bool(choice["message"].get("reasoning_content")) == (num_reasoned > 0)
    assert choice["message"]["content"] and "think>" not in choice["message"]["content"]


def test_a_budget_gives_the_same_tokens_alone_and_in_a_crowd(server):
    bodies = [{"thinking_token_budget": 3 + 5 * at, "seed": at} for at in range(6)]

    async def crowd():
        async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S) as client:
            more = {"messages": QUESTION, "max_tokens": 40, "return_token_ids": True}
            posts = [client.post("/v1/chat/completions", json=more | body) for body in bodies]
            return [answer.json() for answer in await asyncio.gather(*posts)]

    together = asyncio.run(crowd())
    for body, found in zip(bodies, together, strict=True):
        alone = chat(server, **body)
        assert alone["choices"][0]["token_ids"] == found["choices"][0]["token_ids"]
        assert alone["choices"][0]["message"] == found["choices"][0]["message"]


def num_input_tokens(server, path, body):
    answer = server.http.post(path, json={"max_tokens": 1} | body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return usage.get("prompt_tokens") or usage["input_tokens"] + usage.get(
        "cache_read_input_tokens", 0
    )


def test_efforts_and_switches_mean_the_same_in_all_apis(server):
    """The template writes another number of tokens for each."""

    def sizes(chat_fields, responses_fields, messages_fields):
        text = QUESTION[0]["content"]
        asked = [
            ("/v1/chat/completions", {"messages": QUESTION} | chat_fields),
            ("/v1/messages", {"messages": QUESTION} | messages_fields),
        ]
        found = {num_input_tokens(server, path, body) for path, body in asked}
        body = {"input": text, "max_output_tokens": 1} | responses_fields
        body.pop("max_tokens", None)
        answer = server.http.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        found.add(answer.json()["usage"]["input_tokens"])
        (size,) = found
        return size

    adaptive = {"thinking": {"type": "adaptive"}}
    off = sizes({"reasoning_effort": "none"}, {"reasoning": {"effort": "none"}}, {})
    on = sizes({}, {}, adaptive)
    low = sizes(
        {"reasoning_effort": "low"},
        {"reasoning": {"effort": "low"}},
        adaptive | {"output_config": {"effort": "low"}},
    )
    disabled = sizes(
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"thinking": {"type": "disabled"}},
    )
    assert on < off == disabled and low > on


def num_calls(server, seed, *, is_parallel):
    """In each API, of a message that must call."""
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    common = {"temperature": 20.0, "seed": seed}
    function = {"name": "go", "parameters": schema}
    asked = common | {"tool_choice": "required", "parallel_tool_calls": is_parallel}
    tools = [{"type": "function", "function": function}]
    answer = chat(server, **asked, tools=tools, chat_template_kwargs={"enable_thinking": False})
    found = [len(answer["choices"][0]["message"]["tool_calls"])]
    body = asked | {
        "input": "go",
        "max_output_tokens": 60,
        "tools": [{"type": "function"} | function],
    }
    body |= {"chat_template_kwargs": {"enable_thinking": False}}
    answer = server.http.post("/v1/responses", json=body).json()
    found.append(sum(item["type"] == "function_call" for item in answer["output"]))
    choice = {"type": "any", "disable_parallel_tool_use": not is_parallel}
    body = common | {"messages": QUESTION, "max_tokens": 60, "tool_choice": choice}
    body |= {"tools": [{"name": "go", "input_schema": schema}], "temperature": 1.0}
    answer = server.http.post("/v1/messages", json=body).json()
    found.append(sum(block["type"] == "tool_use" for block in answer["content"]))
    return found


def test_parallel_calls_come_only_where_they_are_allowed(server):
    single = [num_calls(server, seed, is_parallel=False) for seed in range(4)]
    assert all(counts == [1, 1, 1] for counts in single)
    several = [num_calls(server, seed, is_parallel=True) for seed in range(4)]
    assert max(counts[0] for counts in several) > 1
