"""The calls that `stalls.py` makes: each is large in one way, and as large as the server takes."""

import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any


def completion(**fields: Any) -> tuple[str, bytes]:
    return "/v1/completions", _json(fields)


def chat(messages: list[Any], **fields: Any) -> tuple[str, bytes]:
    return "/v1/chat/completions", _json({"messages": messages, "max_tokens": 1, **fields})


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


HELLO = [{"role": "user", "content": "Hello"}]
PROMPTS = [f"def f{index}(" for index in range(256)]
LONG_PROMPTS = [[5 + (index + at) % 400 for at in range(180)] for index in range(256)]
SALTS = itertools.count()
WHOLE = {"max_tokens": 180, "ignore_eos": True}
DIGITS = b"9" * 4300


def new_prompts(**fields: Any) -> tuple[str, bytes]:
    """None of them is in the prefix cache."""
    return completion(prompt=LONG_PROMPTS, cache_salt=str(next(SALTS)), **fields)


CASES: dict[str, tuple[int, Callable[[], tuple[str, bytes]]]] = {
    "1,024 answers of 180 tokens with 20 logprobs": (
        1,
        lambda: completion(prompt=PROMPTS, n=4, logprobs=20, **WHOLE),
    ),
    "the same by chat, 128 answers": (
        1,
        lambda: chat(HELLO, n=128, logprobs=True, top_logprobs=20, **WHOLE),
    ),
    "256 prompts of 180 tokens": (1, lambda: new_prompts(max_tokens=1)),
    "four such calls at once": (4, lambda: new_prompts(max_tokens=1)),
    "256 prompts of 180 tokens, prompt_logprobs 20": (
        1,
        lambda: completion(prompt=LONG_PROMPTS, max_tokens=1, prompt_logprobs=20),
    ),
    "the same, four calls at once": (
        4,
        lambda: completion(prompt=LONG_PROMPTS, max_tokens=1, prompt_logprobs=20),
    ),
    "256 prompts of 180 tokens, echoed with 20 logprobs": (
        1,
        lambda: completion(prompt=LONG_PROMPTS, max_tokens=0, logprobs=20, echo=True),
    ),
    "1,024 answers of 180 tokens": (1, lambda: completion(prompt=PROMPTS, n=4, **WHOLE)),
    "1,024 streamed answers with 20 logprobs": (
        1,
        lambda: completion(prompt=PROMPTS, n=4, logprobs=20, stream=True, **WHOLE),
    ),
    "190,000 prompts [1]": (1, lambda: completion(prompt=[[1]] * 190_000)),
    "1,900,000 prompts": (1, lambda: completion(prompt=["a"] * 1_900_000)),
    "190,000 template arguments": (
        1,
        lambda: chat(HELLO, chat_template_kwargs={f"a{at}": 1 for at in range(190_000)}),
    ),
    "1,900 integers of 4,300 digits": (
        1,
        lambda: ("/v1/completions", b'{"prompt":[' + b",".join([DIGITS] * 1900) + b"]}"),
    ),
    "numbers of 8 MB": (
        1,
        lambda: ("/v1/completions", b'{"prompt":[1.' + b"3" * 8_000_000 + b"]}"),
    ),
    "1,900,000 token ids": (1, lambda: completion(prompt=[1] * 1_900_000)),
    "a text of 8 MB": (1, lambda: completion(prompt="a b " * 2_000_000)),
    "60,000 messages": (1, lambda: chat([{"role": "user", "content": "a"}] * 60_000)),
    "a message of 60,000 parts": (
        1,
        lambda: chat([{"role": "user", "content": [{"type": "text", "text": "a"}] * 60_000}]),
    ),
    "190,000 unknown fields": (
        1,
        lambda: ("/v1/completions", _json({f"a{at}": 1 for at in range(190_000)})),
    ),
    "190,000 biases": (
        1,
        lambda: completion(prompt="a", logit_bias={str(at): 1 for at in range(190_000)}),
    ),
    "1,000,000 stop strings": (1, lambda: completion(prompt="a", stop=["b"] * 1_000_000)),
    "4,096 bad words": (
        1,
        lambda: completion(prompt="a", bad_words=[f"word{at}" for at in range(4096)]),
    ),
    "lists in lists, 190,000 deep": (
        1,
        lambda: ("/v1/completions", b'{"prompt":' + b"[" * 190_000 + b"]" * 190_000 + b"}"),
    ),
    "to tokenize: a text of 2 MB": (
        1,
        lambda: ("/tokenize", _json({"prompt": "def f(x): " * 200_000, "return_token_strs": True})),
    ),
    "to detokenize: 1,000,000 tokens": (
        1,
        lambda: ("/detokenize", _json({"tokens": [at % 500 for at in range(1_000_000)]})),
    ),
    "16 beams of 180 tokens": (
        1,
        lambda: completion(prompt="def f(", n=16, use_beam_search=True, max_tokens=180),
    ),
}

TOO_MANY = [1] * 900_000
NUMBERS = [1e-300 * (1 + at) for at in range(90_000)]
OBJECTS: dict[str, Any] = {"a": [{"b": [1, 2, 3]}] * 15_000}
"""Inside of something, without any meaning there. The last two are just below the bound."""

ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "900,000 integers": [{"a": TOO_MANY}],
    "numbers": [{"a": NUMBERS[:19_000]}] * 4,
    "objects": [{"a": OBJECTS["a"][:3_000]}] * 4,
}
"""Of the calls in one message."""
WRITE = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "write", "parameters": WRITE}}
USER = {"role": "user", "content": "Hello"}


def post(path: str, **fields: Any) -> Callable[[], tuple[str, bytes]]:
    return lambda: (path, _json(fields))


def with_calls(
    each: list[dict[str, Any]],
) -> Iterator[tuple[str, Callable[[], tuple[str, bytes]]]]:
    """By API: a call whose history has calls of a tool with these arguments."""
    texts = [_json(arguments).decode() for arguments in each]
    ids = [f"c{at}" for at in range(len(each))]

    def chat_messages(forms: list[Any]) -> list[Any]:
        calls = [
            {"id": at, "type": "function", "function": {"name": "write", "arguments": form}}
            for at, form in zip(ids, forms, strict=True)
        ]
        answers = [{"role": "tool", "tool_call_id": at, "content": "ok"} for at in ids]
        return [USER, {"role": "assistant", "content": None, "tool_calls": calls}, *answers]

    called = [{"function": {"name": "write", "arguments": arguments}} for arguments in each]
    ollama = {"role": "assistant", "tool_calls": called}
    used = [
        {"type": "tool_use", "id": at, "name": "write", "input": arguments}
        for at, arguments in zip(ids, each, strict=True)
    ]
    results = [{"type": "tool_result", "tool_use_id": at, "content": "ok"} for at in ids]
    turns = [USER, {"role": "assistant", "content": used}, {"role": "user", "content": results}]
    items = [
        {"type": "function_call", "call_id": at, "name": "write", "arguments": text}
        for at, text in zip(ids, texts, strict=True)
    ]
    items += [{"type": "function_call_output", "call_id": at, "output": "ok"} for at in ids]
    tools = {"tools": [TOOL], "max_tokens": 1}
    yield "a chat", post("/v1/chat/completions", messages=chat_messages(each), **tools)
    yield "a chat, as text", post("/v1/chat/completions", messages=chat_messages(texts), **tools)
    yield "Messages", post("/v1/messages", messages=turns, max_tokens=1)
    yield "Responses", post("/v1/responses", input=items, max_output_tokens=1)
    yield "Ollama", post("/api/chat", messages=[USER, ollama], stream=False)


CASES |= {
    f"{kind} in calls of {api}": (1, make)
    for kind, each in ARGUMENTS.items()
    for api, make in with_calls(each)
}

PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 1},
    "/v1/messages": {"messages": [USER], "max_tokens": 1},
    "/v1/responses": {"input": [USER], "max_output_tokens": 1},
    "/api/chat": {"messages": [USER], "options": {"num_predict": 1}, "stream": False},
    "/v1/embeddings": {"input": "a"},
    "/rerank": {"query": "a", "documents": ["b", "c"]},
}
MESSAGE_FIELDS = {
    path: "input" if "input" in fields else "messages"
    for path, fields in PATHS.items()
    if path.startswith(("/v1/chat", "/v1/messages", "/v1/responses", "/api"))
}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [*range(90_000)]}}}
FUNCTIONS = {
    "/v1/chat/completions": {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    "/v1/messages": {"name": "f", "input_schema": SCHEMA},
    "/v1/responses": {"type": "function", "name": "f", "parameters": SCHEMA},
    "/api/chat": {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
}

CASES |= {
    f"90,000 unknown fields to {path}": (
        1,
        post(path, **fields, **{f"a{at}": 1 for at in range(90_000)}),
    )
    for path, fields in PATHS.items()
}
CASES |= {
    f"numbers in an unknown field of a message to {path}": (
        1,
        post(path, **PATHS[path] | {name: [USER | {"junk": NUMBERS}]}),
    )
    for path, name in MESSAGE_FIELDS.items()
}
CASES |= {
    f"objects in an unknown field of a message to {path}": (
        1,
        post(path, **PATHS[path] | {name: [USER | {"junk": OBJECTS}]}),
    )
    for path, name in MESSAGE_FIELDS.items()
}
CASES |= {
    f"a tool with an enum of 90,000 to {path}": (1, post(path, **PATHS[path], tools=[tool]))
    for path, tool in FUNCTIONS.items()
}
CASES |= {
    "30,000 items of Responses": (
        1,
        post("/v1/responses", input=[USER] * 30_000, max_output_tokens=1, store=True),
    ),
    "metadata of 4,000 in Responses": (
        1,
        post("/v1/responses", input="a", metadata={f"a{at}": "b" for at in range(4_000)}),
    ),
    "900,000 of include in Responses": (
        1,
        post("/v1/responses", input="a", include=["b"] * 900_000, max_output_tokens=1),
    ),
    "a tool_choice of 30,000 in Responses": (
        1,
        post(
            "/v1/responses",
            input="a",
            tools=[{"type": "function", "name": "f"}],
            tool_choice={
                "type": "allowed_tools",
                "tools": [{"type": "function", "name": "f"}] * 30_000,
            },
            max_output_tokens=1,
        ),
    ),
    "objects in text of Responses": (
        1,
        post("/v1/responses", input="a", text={"junk": OBJECTS}, max_output_tokens=1),
    ),
    "30,000 blocks of Messages": (
        1,
        post(
            "/v1/messages",
            messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 30_000}],
            max_tokens=1,
        ),
    ),
    "30,000 turns of Messages": (
        1,
        post(
            "/v1/messages",
            messages=[USER, {"role": "assistant", "content": "a"}] * 15_000,
            max_tokens=1,
        ),
    ),
    "90,000 options of Ollama": (
        1,
        post("/api/chat", messages=[USER], options={f"a{at}": 1 for at in range(90_000)}),
    ),
    "900,000 token ids to embed": (1, post("/v1/embeddings", input=TOO_MANY)),
    "2,048 lists of 180 token ids to embed": (
        1,
        post("/v1/embeddings", input=[[5 + at % 400 for at in range(180)]] * 2048),
    ),
    "1,900,000 texts to embed": (1, post("/v1/embeddings", input=["a"] * 1_900_000)),
    "2,048 texts of 3 kB to embed": (1, post("/v1/embeddings", input=["ab " * 100] * 2048)),
    "2,048 documents to rerank": (
        1,
        post("/rerank", query="a", documents=[f"text {at}" * 20 for at in range(2048)]),
    ),
    "2,048 pairs to score": (
        1,
        post("/score", text_1=[f"text {at}" for at in range(2048)], text_2=["b"] * 2048),
    ),
    "2,048 objects to rerank": (
        1,
        post("/rerank", query="a", documents=[{"text": "a"}] * 2048),
    ),
}
"""Of the routes of agents, and of those that embed."""

NUM_CROWD = 50
WIDE = ["x" * 75] * 95_000
DEEP = ("[" * 850 + "1" + "]" * 850).encode()


def deep(path: str, name: str) -> tuple[str, bytes]:
    """Many lists in lists in a message, and a long text."""
    value = {name: [USER | {"junk": "@"}]}
    body = _json(PATHS[path] | value | {"user": "x" * 7_500_000})
    return path, body.replace(b'"@"', b"[" + b",".join([DEEP] * 100) + b"]")


CASES |= {
    f"{NUM_CROWD} wide bodies of 7.5 MB to {path}": (
        NUM_CROWD,
        post(path, **PATHS[path] | {name: [USER | {"junk": WIDE}]}),
    )
    for path, name in MESSAGE_FIELDS.items()
}
CASES |= {
    f"{NUM_CROWD} deep bodies of 7.5 MB to {path}": (NUM_CROWD, partial(deep, path, name))
    for path, name in MESSAGE_FIELDS.items()
}
CASES |= {
    f"{NUM_CROWD} bodies of 7.5 MB to {path}": (
        NUM_CROWD,
        post(path, **{name: ["ab " * 1200] * 2048}, **rest),
    )
    for path, name, rest in (
        ("/v1/embeddings", "input", {}),
        ("/rerank", "documents", {"query": "a"}),
    )
}
"""Many at once, of the greatest size: what they need of memory, and whether others wait."""
