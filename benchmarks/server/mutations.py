"""Valid bodies for every route that takes one, and what becomes of them when they are damaged.

A damaged body has one to four changes: any value in it, at any depth, is replaced, left out,
repeated or wrapped, or a field of the body's class is set to a value of another type. The routes
are those of the application, so a new one without a body here is told of.
"""

import copy
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx

from quire.server.endpoint_registry import ENDPOINTS
from quire.server.http.body import Body

Value = Any
Place = tuple[Any, Any]
"""A list or an object, and an index or a name in it."""

TEXT = {"type": "string", "maxLength": 8}
SCHEMA = {
    "type": "object",
    "properties": {"a": TEXT, "b": {"type": "integer"}, "c": {"enum": ["x", 3, None]}},
    "required": ["a"],
    "additionalProperties": False,
}
FUNCTION = {"name": "write", "description": "Writes.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c", "type": "function", "function": {"name": "write", "arguments": '{"a": "b"}'}}
USER = {"role": "user", "content": "Hello"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "ok"}
SHORT = {"max_tokens": 2, "temperature": 0.5, "seed": 1}
SAMPLED = SHORT | {
    **{"top_p": 0.9, "top_k": 5, "min_p": 0.1, "n": 2, "presence_penalty": 0.5, "priority": 0},
    **{"frequency_penalty": 0.5, "repetition_penalty": 1.1, "stop": ["ab"], "min_tokens": 1},
    **{"stop_token_ids": [3], "bad_words": ["zz"], "logit_bias": {"5": 1}, "ignore_eos": True},
    **{"cache_salt": "s", "deadline_s": 20, "stream": True, "user": "me"},
    **{"stream_options": {"include_usage": True}, "skip_special_tokens": True},
}
FORM = {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA, "strict": True}}
ANTHROPIC_TOOL = {"name": "write", "description": "Writes.", "input_schema": SCHEMA}
ANTHROPIC_TURNS = [
    USER,
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            {"type": "text", "text": "Well."},
            {"type": "tool_use", "id": "t", "name": "write", "input": {"a": "b"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "ok"}]}
        ],
    },
]
ANTHROPIC = {
    **{"messages": ANTHROPIC_TURNS, "system": [{"type": "text", "text": "Be brief."}]},
    **{"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "auto"}},
    **{"thinking": {"type": "enabled", "budget_tokens": 1024}},
}
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
    {"type": "function_call", "call_id": "c", "name": "write", "arguments": '{"a": "b"}'},
    {"type": "function_call_output", "call_id": "c", "output": "ok"},
]
CUSTOM = {"type": "custom", "name": "run", "format": {"type": "grammar", "definition": "a"}}
RESPONSE_TOOLS = [{"type": "function", **FUNCTION}, CUSTOM]
NAMESPACE = {"type": "namespace", "name": "files", "tools": [{"type": "function", **FUNCTION}]}
RESPONSE_FORM = {"format": {"type": "json_schema", "name": "f", "schema": SCHEMA}}
OPTIONS = {"num_predict": 2, "temperature": 0.5, "stop": ["ab"], "top_k": 4, "num_ctx": 100}
OLLAMA_CALLED = {
    "role": "assistant",
    "tool_calls": [{"function": {"name": "write", "arguments": {"a": "b"}}}],
}
OLLAMA_TURNS = [USER, OLLAMA_CALLED, {"role": "tool", "tool_name": "write", "content": "ok"}]

BODIES: dict[str, tuple[dict[str, Value], ...]] = {
    "/v1/completions": (
        SAMPLED | {"prompt": "a", "logprobs": 2, "return_token_ids": True},
        SHORT | {"prompt": [[5, 6], [7]], "echo": True, "logprobs": 1, "prompt_logprobs": 1},
        SHORT | {"prompt": "a", "structured_outputs": {"json": SCHEMA}},
        SHORT | {"prompt": ["a", "b"], "guided_regex": "[a-z]{1,3}", "stream": True},
        SHORT | {"prompt": "a", "guided_choice": ["a", "b"], "extra_body": {"top_k": 1}},
        SHORT | {"prompt": "a", "guided_grammar": 'root ::= "a" | "b"', "n": 2},
        {"prompt": "a", "use_beam_search": True, "n": 2, "max_tokens": 2, "length_penalty": 1.0},
    ),
    "/v1/chat/completions": (
        SAMPLED | {"messages": [PARTS], "logprobs": True, "top_logprobs": 2},
        SHORT | {"messages": [USER, CALLED, RESULT], "tools": [TOOL], "tool_choice": "auto"},
        SHORT | {"messages": [USER], "tools": [TOOL], "tool_choice": "required", "stream": True},
        SHORT
        | {
            "messages": [USER],
            "tools": [TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [TOOL]},
            },
        },
        SHORT | {"messages": [USER], "response_format": FORM},
        SHORT
        | {
            "messages": [{"role": "developer", "content": "Hm."}, USER],
            "reasoning": {"effort": "low", "enabled": True, "exclude": True},
            "thinking_token_budget": 1,
            "chat_template_kwargs": {"enable_thinking": True},
        },
    ),
    "/v1/messages": (
        ANTHROPIC | SHORT | {"stream": True, "stop_sequences": ["ab"]},
        SHORT
        | {
            "messages": [USER],
            "tools": [ANTHROPIC_TOOL],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        },
        SHORT
        | {
            "messages": [USER],
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
    "/v1/messages/count_tokens": (ANTHROPIC,),
    "/v1/responses": (
        {
            **{"input": ITEMS, "tools": [*RESPONSE_TOOLS, NAMESPACE], "max_output_tokens": 2},
            **{"instructions": "Be brief.", "reasoning": {"effort": "low"}, "stream": True},
            **{"metadata": {"a": "b"}, "parallel_tool_calls": False, "store": True},
            **{"tool_choice": {"type": "function", "name": "write"}, "temperature": 0.5},
        },
        {"input": "Hello", "text": RESPONSE_FORM, "max_output_tokens": 2, "top_p": 0.5},
        {
            **{"input": [USER], "include": ["message.output_text.logprobs"], "top_logprobs": 1},
            **{"max_output_tokens": 2, "previous_response_id": None, "stop": ["ab"]},
        },
    ),
    "/v1/responses/input_tokens": ({"input": ITEMS, "tools": [*RESPONSE_TOOLS, NAMESPACE]},),
    "/api/chat": (
        {
            **{"messages": OLLAMA_TURNS, "tools": [TOOL], "options": OPTIONS, "stream": False},
            **{"format": SCHEMA, "think": True, "keep_alive": "5m"},
        },
        {"messages": [USER], "options": OPTIONS, "format": "json", "stream": True},
    ),
    "/api/generate": (
        {"prompt": "a", "system": "Be brief.", "options": OPTIONS, "stream": False, "think": "low"},
        {"prompt": "a", "format": SCHEMA, "options": OPTIONS, "stream": True, "raw": True},
    ),
    "/api/show": ({"model": "embedded", "verbose": True},),
    "/api/pull": ({"model": "embedded", "stream": False, "insecure": False},),
    "/api/embed": (
        {"input": ["a", "b"], "truncate": False, "dimensions": 4, "keep_alive": "5m"},
        {"input": "a", "options": {}, "cache_salt": "s", "priority": 0, "deadline_s": 20},
    ),
    "/api/embeddings": ({"prompt": "a", "truncate_prompt_tokens": 1},),
    "/v1/embeddings": (
        {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 4, "normalize": True},
        {"input": [[5, 6], [7]], "truncate_prompt_tokens": 1, "deadline_s": 20, "priority": 0},
        {"input": "a", "cache_salt": "s", "user": "me"},
    ),
    "/tokenize": (
        {"prompt": "a b", "return_token_strs": True, "add_special_tokens": True},
        {"messages": [USER, CALLED, RESULT], "tools": [TOOL], "add_generation_prompt": True},
    ),
    "/detokenize": ({"tokens": [5, 6, 7]},),
}
BODIES |= dict.fromkeys(
    ("/rerank", "/v1/rerank", "/v2/rerank"),
    (
        {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": True},
        {"query": "a", "documents": ["b"], "instruction": None, "truncate_prompt_tokens": 2},
    ),
)
BODIES |= dict.fromkeys(
    ("/score", "/v1/score"),
    (
        {"text_1": "a", "text_2": ["b", "c"], "priority": 0, "deadline_s": 20},
        {"queries": ["a", "b"], "documents": ["c", "d"], "truncate_prompt_tokens": 2},
    ),
)
BODIES |= {
    "/v1/load_lora_adapter": ({"lora_name": "a", "lora_path": "/nowhere", "load_inplace": True},),
    "/v1/unload_lora_adapter": ({"lora_name": "a", "lora_int_id": 1},),
    "/replicas/restart": ({"replica": "0", "timeout_s": 0.5},),
    "/replicas/scale": ({"num_replicas": 2},),
    "/v1/batches": (
        {
            **{"input_file_id": "file-1", "endpoint": "/v1/completions"},
            **{"completion_window": "24h", "metadata": {"a": "b"}},
        },
    ),
}
"""By path: bodies that are answered with 200, with many fields in one or the other; the last five
are so by a server that has adapters, replicas, or a folder of batches, alone."""

JUNK: tuple[Value, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, 2**64, -(2**63) - 1, 10**30, 1.5, -0.0),
    *(1e308, float("inf"), float("nan"), 1e-320, "", "a", "0", "null", "\ud800", "é" * 40, "\0"),
    *("x" * 3000, "<|im_start|>", "{", "[]", "{}", '{"a": 1}', "auto", "none", "required", "low"),
    *("root ::= a", "start: x", "(a", "%json {", "text", "json_schema", "function", "assistant"),
    *([], [None], [[]], [[], 1], [""], [1] * 40, ["a"] * 300, {}, {"": None}, {"type": "object"}),
    *({"type": "function"}, {"type": ["a"]}, {"type": {}}, {"text": "a"}, {"a": {"b": [{}]}}),
    *({"$ref": "#"}, {"anyOf": []}, {"enum": []}, {"pattern": "("}, {"type": "text", "text": "a"}),
)


FAULTS = ('"server_error"', '"api_error"', '"internal_error"', '"code":5', '"code":"5')
"""In a stream that had begun: the server's fault, as each API tells of it."""


def deep(num_levels: int) -> Value:
    """Objects and lists inside of each other."""
    value: Value = 1
    for _ in range(num_levels // 2):
        value = {"a": [value]}
    return value


@cache
def routes() -> dict[str, type[Body]]:
    """The body's class of every path of the application that takes one in a POST call. Raises
    LookupError for one without a body above."""
    found = {
        route.path_format: route.body_class
        for _, each in ENDPOINTS.items()
        for route in each.routes
        if route.body_class is not None and "POST" in (route.methods or ())
    }
    if missing := sorted(found.keys() - BODIES.keys()):
        raise LookupError(f"mutations.BODIES has no body for {', '.join(missing)}")
    return dict(sorted(found.items()))


def places(value: Value) -> Iterator[Place]:
    """All that is in a value, at any depth."""
    rest = [value]
    while rest:
        outer = rest.pop()
        for name in list(outer) if isinstance(outer, dict) else range(len(outer)):
            yield outer, name
            if isinstance(outer[name], dict | list):
                rest.append(outer[name])


def damaged(path: str, choose: random.Random) -> dict[str, Value]:
    """A body of the route, with a few changes."""
    body = copy.deepcopy(choose.choice(BODIES[path]))
    for _ in range(choose.choice((1, 1, 1, 2, 2, 4))):
        if choose.random() < 0.3:
            body[_field_of(path, choose)] = _junk(choose)
        elif found := list(places(body)):
            _damage(*choose.choice(found), choose)
    return body


def _field_of(path: str, choose: random.Random) -> str:
    kind = routes()[path]
    known = [*kind.model_fields, *kind.not_supported, *kind.hints, "extra_body", "unknown"]
    return choose.choice(sorted(known))


def _junk(choose: random.Random) -> Value:
    if choose.random() < 0.03:  # four of them are still less than Python's json can write
        return deep(choose.choice((20, 90, 200)))
    value = copy.deepcopy(choose.choice(JUNK))
    while choose.random() < 0.2:
        value = choose.choice(([value], {"a": value}, [value, value], {"type": value}))
    return value


def _damage(outer: Any, name: Any, choose: random.Random) -> None:
    kind = choose.randrange(6)
    if kind == 0:
        del outer[name]
    elif kind == 1 and isinstance(outer, list):
        outer += [outer[name]] * choose.choice((1, 3, 60))
    elif kind == 2:
        outer[name] = [outer[name]]
    elif kind == 3 and isinstance(outer, dict):
        outer[choose.choice(("type", "id", "name", "text", "content", "role", "x"))] = _junk(choose)
    else:
        outer[name] = _junk(choose)


def fault_of(answer: httpx.Response) -> str | None:
    """The fault of an answer that is wrong for any call; None if there is none."""
    if answer.status_code >= 500 or any(fault in answer.text for fault in FAULTS):
        return f"{answer.status_code} {answer.text:.500}"
    if answer.status_code >= 400 and "error" not in answer.json():
        return f"{answer.status_code} without an error: {answer.text:.200}"
    return None
