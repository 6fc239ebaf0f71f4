"""Asks a server through OpenAI's clients in every way that they have: sync and async, the whole
answer or a stream of it. All four give the same `Answer`."""

import asyncio
import typing
from dataclasses import dataclass, field
from typing import Any

import openai
from openai.types import completion_create_params
from openai.types.chat import chat_completion_stream_options_param
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

COMPLETIONS, CHAT, RESPONSES = "completions", "chat", "responses"

PROMPT = "import os\n"
QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]

WISHES = {
    COMPLETIONS: {"model": "embedded", "temperature": 0, "max_tokens": 8, "prompt": PROMPT},
    CHAT: {"model": "embedded", "temperature": 0, "max_tokens": 8, "messages": QUESTION},
}


def openai_fields(api):
    """The names of all fields that OpenAI's package knows of a request."""
    kinds = {
        COMPLETIONS: completion_create_params.CompletionCreateParams,
        CHAT: chat_create_params.CompletionCreateParams,
        RESPONSES: response_create_params.ResponseCreateParams,
        "stream_options": (
            chat_completion_stream_options_param.ChatCompletionStreamOptionsParam | None
        ),
    }
    return {
        name
        for kind in typing.get_args(kinds[api])
        for name in getattr(kind, "__annotations__", {})
    }


@dataclass
class Answer:
    """What came, by choice. whole: the client's own object, None of a stream; chunks: of one."""

    texts: list[str] = field(default_factory=list)
    reasons: list[Any] = field(default_factory=list)
    stop_reasons: list[Any] = field(default_factory=list)
    logprobs: list[list[Any]] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    prompt_token_ids: list[Any] = field(default_factory=list)
    usage: Any = None
    whole: Any = None
    chunks: list[Any] = field(default_factory=list)

    def take(self, choice):
        """Take in a choice, or a piece of one."""
        while len(self.texts) <= choice.index:
            for part in (self.texts, self.reasons, self.stop_reasons, self.prompt_token_ids):
                part.append(None)
            self.logprobs.append([])
            self.token_ids.append([])
        at = choice.index
        self.texts[at] = (self.texts[at] or "") + _text(choice)
        self.reasons[at] = self.reasons[at] or choice.finish_reason
        self.stop_reasons[at] = self.stop_reasons[at] or getattr(choice, "stop_reason", None)
        self.logprobs[at] += _logprobs(choice)
        self.token_ids[at] += getattr(choice, "token_ids", None) or []
        self.prompt_token_ids[at] = self.prompt_token_ids[at] or getattr(
            choice, "prompt_token_ids", None
        )


class Clients:
    """OpenAI's two clients of one server. To be closed. plain_answers: for Asker's use."""

    def __init__(self, url):
        options = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
        self.plain_answers = {}
        self._runner = asyncio.Runner()
        self._sync = openai.OpenAI(**options)
        self._async = openai.AsyncOpenAI(**options)

    def close(self):
        self._runner.run(self._async.close())
        self._runner.close()
        self._sync.close()

    def ask(self, api, mode, wish):
        """The client's own object, or the list of a stream's."""
        client = self._sync if mode.startswith("sync") else self._async
        create = (client.completions if api == COMPLETIONS else client.chat.completions).create
        known = {name: value for name, value in wish.items() if name in openai_fields(api)}
        extra = {name: value for name, value in wish.items() if name not in known}
        if mode.startswith("async"):
            return self._runner.run(_await(create(**known, extra_body=extra)))
        answer = create(**known, extra_body=extra)
        return list(answer) if isinstance(answer, openai.Stream) else answer


async def _await(call):
    answer = await call
    if isinstance(answer, openai.AsyncStream):
        return [chunk async for chunk in answer]
    return answer


class Asker:
    """Asks one API in one mode for short, greedy answers, unless the fields say otherwise."""

    def __init__(self, clients, api, mode):
        self.clients, self.api, self.mode = clients, api, mode

    @property
    def streams(self):
        return self.mode.endswith("stream")

    def __call__(self, **fields):
        """The answer; without fields it is kept, and asked for once only."""
        if fields:
            return self._ask(fields)
        known = self.clients.plain_answers
        key = (self.api, self.mode)
        if key not in known:
            known[key] = self._ask({})
        return known[key]

    def _ask(self, fields):
        wish = WISHES[self.api] | fields
        if not self.streams:
            return _whole(self.clients.ask(self.api, self.mode, wish))
        wish |= {"stream": True}
        wish.setdefault("stream_options", {"include_usage": True})
        return _joined(self.clients.ask(self.api, self.mode, wish))


def _whole(answer):
    found = Answer(whole=answer, usage=answer.usage)
    for choice in answer.choices:
        found.take(choice)
    _take_prompt(found, answer)
    return found


def _joined(chunks):
    found = Answer(chunks=chunks)
    for chunk in chunks:
        for choice in chunk.choices:
            found.take(choice)
        found.usage = chunk.usage or found.usage
        _take_prompt(found, chunk)
    return found


def _take_prompt(found, answer):
    """A chat's prompt stands beside its choices, not in them."""
    ids = getattr(answer, "prompt_token_ids", None)
    if ids is not None:
        found.prompt_token_ids = [ids] * len(found.texts)


def _text(choice):
    if hasattr(choice, "text"):
        return choice.text
    part = choice.delta if hasattr(choice, "delta") else choice.message
    return part.content or ""


def _logprobs(choice):
    """(token, log-probability, likeliest) of each token, in either shape."""
    found = choice.logprobs
    if found is None:
        return []
    if hasattr(found, "content"):
        return [
            (each.token, each.logprob, {top.token: top.logprob for top in each.top_logprobs})
            for each in found.content
        ]
    return list(zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True))
