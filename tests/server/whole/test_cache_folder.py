"""A server whose prefixes are kept on disk: its engine dies, all of it dies, another one comes."""

import asyncio
import json
import os
import signal
import sys

import httpx
import psutil
import pytest
from tests.server.launching import WAIT_S, is_running, launched

from quire.cli.cache import verify

PROMPT_TOKENS, NEW_TOKENS = 600, 300
SIZES = {"num_blocks": 1024, "max_num_seqs": 8, "max_model_len": 1024, "seed": 5}
# Without drafts, so that the streams last until the engine is killed.
SIZES |= {"speculation": "off"}


def options(folder, **changes):
    return SIZES | {"cache_dir": str(folder), "cache_size": "64MiB"} | changes


def body_of(index, **more):
    """One call; its prompt has no part in common with another one's."""
    prompt = [300 + (7 * index + 13 * at * (index + 1)) % 3600 for at in range(PROMPT_TOKENS)]
    body = {"prompt": prompt, "seed": index, "temperature": 0.5 * (index % 2), "logprobs": 0}
    return body | {"max_tokens": NEW_TOKENS, "ignore_eos": True, "return_token_ids": True} | more


class Seen:
    """What came of a stream."""

    def __init__(self):
        self.token_ids, self.logprobs = [], []

    def note(self, line):
        if line.startswith("data: {"):
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                self.token_ids += choice["token_ids"]
                self.logprobs += choice["logprobs"]["token_logprobs"]

    @property
    def result(self):
        return self.token_ids, self.logprobs


async def stream_all(server, num_calls, kill):
    """The results of all calls; `kill` is called, in a thread, when all have begun to answer."""
    seen = [Seen() for _ in range(num_calls)]

    async def stream(client, index):
        body = body_of(index, stream=True)
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                seen[index].note(line)

    async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S) as client:
        calls = [asyncio.ensure_future(stream(client, index)) for index in range(num_calls)]
        while not all(each.token_ids for each in seen):
            await asyncio.sleep(0.001)
        await asyncio.to_thread(kill)
        assert not all(call.done() for call in calls), "it came too late"
        await asyncio.gather(*calls)
    return [each.result for each in seen]


def complete(server, index, **more):
    """(token ids, log-probabilities, tokens from the cache) of a call."""
    answer = server.http.post("/v1/completions", json=body_of(index, **more)).raise_for_status()
    (choice,) = answer.json()["choices"]
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], cached


PATIENT = """
import sys
from quire.engine_process import engine_main
from quire.core.memory.tiers import loads
loads.MIN_PATIENCE_S = 60.0
sys.exit(engine_main.main())
"""
"""An engine's process that gives up no load because the machine is slow."""

QUICK = """
import sys
from quire.assembly import tier_build
from quire.engine_process import engine_main
tier_build.TAKE_OVER_S = 0.2
sys.exit(engine_main.main())
"""
"""An engine's process that waits less for the folder than others do."""


@pytest.fixture(scope="module")
def undisturbed(server):
    """Results of a server without a cache folder."""
    return [complete(server, index)[:2] for index in range(3)]


def test_an_engine_and_then_a_server_are_killed(tmp_path, undisturbed, why_torch):
    folder = tmp_path / "cache"
    command = [sys.executable, "-c", PATIENT]
    with launched(options(folder), command=command, max_engine_restarts=20) as first:

        def kill():
            first.wait_until(lambda stats: stats["tiers"]["num_stored_blocks"] > 3 * 34)
            first.current_engine().kill()

        results = asyncio.run(stream_all(first, 3, kill))
        if why_torch is None:
            assert results == undisturbed
        first.wait_for_restarts(1)
        stats = first.wait_until(lambda stats: stats["num_held_blocks"] == 0)
        moves = stats["tiers"]
        assert moves["num_loads"] == 3 and moves["num_failed_blocks"] == moves["num_late"] == 0
        assert moves["num_loaded_tokens"] > 3 * 0.8 * PROMPT_TOKENS
        assert stats["num_computed_tokens"] < 3 * (PROMPT_TOKENS + NEW_TOKENS) / 2
        first.wait_until(lambda stats: stats["tiers"]["num_waiting_blocks"] == 0)
        first.signal(signal.SIGKILL)
        assert first.wait_for_exit() == -signal.SIGKILL
    with launched(options(folder), command=command) as second:
        for index in range(2):
            *result, cached = complete(second, index)
            assert cached >= PROMPT_TOKENS - 32
            if why_torch is None:
                assert tuple(result) == undisturbed[index]
        second.wait_until(lambda stats: stats["num_held_blocks"] == 0)


def test_a_folder_in_use_is_refused_by_name_and_taken_over_from_the_dead(tmp_path):
    """An engine whose API server is gone stores what was published, and lets go."""
    folder = tmp_path / "cache"
    command = [sys.executable, "-c", QUICK]
    with launched(options(folder)) as first:
        with launched(options(folder), command=command, wait=False) as refused:
            assert refused.wait_for_exit() == 1
            said = refused.output()
        assert "Traceback" not in said
        engine = first.current_engine()
        assert f"cache_dir {str(folder)!r} is in use by process {engine.pid};" in said
        assert complete(first, 0)[2] == 0, "the first one serves on"
        os.kill(first.process.pid, signal.SIGKILL)
        with launched(options(folder)) as second:
            assert complete(second, 0)[2] >= PROMPT_TOKENS - 32
            complete(second, 1)
            second.signal(signal.SIGTERM)
            assert second.wait_for_exit() == 0
        _, living = psutil.wait_procs([engine], timeout=WAIT_S)
        assert not any(is_running(each) for each in living)
    checked = verify(folder)
    assert not checked.is_bad and not checked.unread
    assert checked.num_records >= 2 * (PROMPT_TOKENS + NEW_TOKENS) // 16, "of both calls"
