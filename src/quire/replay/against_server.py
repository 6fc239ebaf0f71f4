"""Replays a trace against a running server through OpenAI's API.

With token ids as prompts, each answer has its recorded length; see `call_kinds`. Requests are sent
at their recorded times, even if earlier ones have not ended. A later turn of a conversation waits
for the answer before it.
"""

from __future__ import annotations

import asyncio
import errno
import heapq
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigurationError
from quire.replay.call_kinds import CallKind, TokenCalls
from quire.replay.completion_client import (
    ServerAddress,
    StreamedAnswer,
    complete,
    get_json,
)
from quire.replay.figures import ReplayFigures, Reply
from quire.replay.script import ModelBounds, ReplayScript
from quire.traces.trace import Trace, TraceRequest

#: The error code of an answer that breaks off, and of a refused connection.
BROKEN = "broken off"
#: The error code of a call that this process could not send.
NO_DESCRIPTORS = "not sent: too many open connections for this process (ulimit -n)"

#: Prompts use no token id below this number, or below a quarter of a small vocabulary, since low
#: ids are often special tokens.
LARGEST_FIRST_TOKEN_ID = 256


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The name and the bounds of the model that a server serves."""

    name: str
    bounds: ModelBounds


TOKENS = TokenCalls()


async def find_model(
    address: ServerAddress,
    name: str | None,
    vocab_size: int | None,
    usual: ModelBounds | None = None,
) -> ServedModel:
    """Ask the server for its model `name`, or for its first model if `name` is None.

    If `vocab_size` is None, it comes from /api/show, which quire and Ollama serve. `usual` has the
    bounds of a server that does not report its own. Raises ConfigurationError if the server can't
    be reached, or without `usual` if one of its responses lacks a needed field.
    """
    try:
        # First, find the model and its length.
        listed = await get_json(address, "GET", "/v1/models")
        cards = (listed or {}).get("data") or [{}]
        card = next((each for each in cards if each.get("id") == name), cards[0])
        name = name or card.get("id")
        longest = card.get("max_model_len")
        if longest is None and usual is not None:
            longest = usual.max_model_len
        if name is None or longest is None:
            raise ConfigurationError(
                f"{address.host}:{address.port} does not list a model and its max_model_len at"
                " /v1/models; a replay needs a server of quire or vLLM"
            )
        # Then, find the size of its vocabulary.
        if vocab_size is None:
            shown = await get_json(address, "POST", "/api/show", {"model": name})
            info = (shown or {}).get("model_info", {})
            sizes = [each for key, each in info.items() if key.endswith(".vocab_size")]
            if not sizes and usual is not None:
                sizes = [usual.vocab_size]
            if not sizes:
                raise ConfigurationError(
                    f"{address.host}:{address.port} does not report the vocabulary size of {name};"
                    " give --vocab-size"
                )
            vocab_size = int(sizes[0])
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        raise ConfigurationError(
            f"{address.host}:{address.port} can't be asked for its models: {error}"
        ) from error
    first = min(LARGEST_FIRST_TOKEN_ID, vocab_size // 4)
    return ServedModel(name, ModelBounds(vocab_size, int(longest), first))


async def replay_to_server(
    trace: Trace,
    address: ServerAddress,
    model: ServedModel,
    *,
    is_closed: bool = True,
    on_reply: Callable[[Reply], None] | None = None,
    kind: CallKind = TOKENS,
    most_open: int | None = None,
) -> ReplayFigures:
    """Replay the whole trace. `on_reply` is called with the reply of each request when it ends.
    `most_open` bounds the requests that are open at once; None means no bound."""
    script = ReplayScript(trace, model.bounds, is_closed=is_closed)
    replay = _ServerReplay(script, address, model, on_reply, kind, most_open)
    replies = await replay.run()
    return ReplayFigures(trace, replies, script.left_out, replay.notes())


class _ServerReplay:
    """One replay against a server.

    Invariant: each request from the script is in `_waiting`, is counted in `_num_open` (sent but
    unanswered), or has its reply in `_replies`.
    """

    def __init__(
        self,
        script: ReplayScript,
        address: ServerAddress,
        model: ServedModel,
        on_reply: Callable[[Reply], None] | None,
        kind: CallKind,
        most_open: int | None,
    ) -> None:
        self._kind, self._most_open = kind, most_open
        self._script, self._address = script, address
        self._model_name, self._max_model_len = model.name, model.bounds.max_model_len
        self._on_reply = on_reply
        self._began_s = 0.0
        self._replies: list[Reply] = []
        self._waiting = [(due.at_s, due.number) for due in script.first]  # a heap
        self._num_open = 0
        self._has_ended = asyncio.Event()  # set when a request ends
        self._changed: Counter[str] = Counter()
        if (num_tenants := len({each.tenant for each in script.trace.requests})) > 1:
            self._changed["tenants sent these requests; all are replayed as one"] = num_tenants

    async def run(self) -> Sequence[Reply]:
        self._began_s = time.perf_counter()
        heapq.heapify(self._waiting)
        async with asyncio.TaskGroup() as tasks:  # a bug in one task ends the replay
            while self._waiting or self._num_open:
                may_send = self._waiting and self._num_open != self._most_open
                wait_s = self._waiting[0][0] - self._now_s() if may_send else None
                if wait_s is None or wait_s > 0:
                    await self._until_one_ends(wait_s)
                    continue
                self._num_open += 1
                tasks.create_task(self._send_request(heapq.heappop(self._waiting)[1]))
        self._replies.sort(key=lambda reply: reply.at_s)
        return self._replies

    async def _until_one_ends(self, most_s: float | None) -> None:
        self._has_ended.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._has_ended.wait()

    def notes(self) -> list[str]:
        """Sentences that say how the replay differed from the trace."""
        return [f"{count} {what}" for what, count in self._changed.items()]

    async def _send_request(self, number: int) -> None:
        script, request = self._script, self._script.trace.requests[number]
        prompt = script.prompt(number)
        body = self._body(request, prompt, script.num_output_tokens(number))
        reply = Reply(number, self._now_s())
        answer: StreamedAnswer | None = None
        try:
            answer = await self._completed(request, body)
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            is_ours = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
            reply.refused = NO_DESCRIPTORS if is_ours else BROKEN
        reply.end_s = self._now_s()
        if answer is not None:
            self._read(reply, answer, len(prompt))
        self._replies.append(reply)
        if self._on_reply is not None:
            self._on_reply(reply)
        output = [] if answer is None else answer.token_ids
        for due in script.end(number, reply.end_s, prompt, output):
            heapq.heappush(self._waiting, (due.at_s, due.number))
        self._num_open -= 1
        self._has_ended.set()

    async def _completed(
        self, request: TraceRequest, body: Mapping[str, Any]
    ) -> StreamedAnswer | None:
        """Send a request and return its answer. If the client disconnected before the first token
        in the trace, do the same and return None."""
        if request.end != "disconnect":
            return await self._complete(body)
        if request.num_output_tokens:
            return await self._complete(body, leave_after=request.num_output_tokens)
        try:
            async with asyncio.timeout(request.took_s or 0.0):
                return await self._complete(body, leave_after=1)
        except TimeoutError:
            return None

    async def _complete(
        self, body: Mapping[str, Any], leave_after: int | None = None
    ) -> StreamedAnswer:
        path = self._kind.path
        return await complete(self._address, body, path=path, leave_after=leave_after)

    def _body(
        self, request: TraceRequest, prompt: list[int], num_output_tokens: int
    ) -> dict[str, Any]:
        options = request.options
        if request.end == "disconnect":
            # The client disconnects early, so the answer must be longer than what the client
            # received.
            wanted = max(num_output_tokens, options.max_tokens or 0)
            num_output_tokens = min(wanted, self._max_model_len - len(prompt))
        body: dict[str, Any] = {
            "model": self._model_name,
            **self._kind.fields(prompt, num_output_tokens),
            "temperature": 0 if options.is_greedy else 1,
            "n": options.num_choices,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self._count_change(options.has_grammar, "requests had a grammar, which is not replayed")
        self._count_change(options.adapter, "requests named an adapter, and ran on the base model")
        self._count_change(
            options.beam_width, "requests used beam search, and were sampled instead"
        )
        if options.beam_width:
            body["n"] = options.beam_width
        return body

    def _count_change(self, is_so: object, what: str) -> None:
        if is_so:
            self._changed[what] += 1

    def _read(self, reply: Reply, answer: StreamedAnswer, num_prompt_tokens: int) -> None:
        if answer.status != 200 or answer.code is not None:
            reply.refused = f"{answer.status} {answer.code or ''}".strip()
        times = [(time_s - self._began_s, count) for time_s, count in answer.times_s]
        if not times:
            return
        reply.first_s = last_s = times[0][0]
        reply.num_output_tokens = times[0][1]
        for time_s, count in times[1:]:
            reply.gaps_s += [(time_s - last_s) / count] * count
            reply.num_output_tokens += count
            last_s = time_s
        usage = answer.usage or {}
        details = usage.get("prompt_tokens_details") or {}
        reply.num_cached_tokens = int(details.get("cached_tokens") or 0)
        if usage:  # a client that left early gets no usage
            reply.num_prompt_tokens = int(usage.get("prompt_tokens") or num_prompt_tokens)
            reply.num_output_tokens = int(usage.get("completion_tokens") or 0)
            lacks_ids = not answer.token_ids and self._kind.path == TOKENS.path
            self._count_change(lacks_ids, "answers came without token ids: later turns miss")

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s
