"""An AsyncEngine on the fake engine's process, and what tests ask of it."""

import asyncio

import psutil
from tests.engine_client.fake_engine_process import COMMAND

from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.engine_client.async_engine import AsyncEngine

ENDLESS = 10**9


def request(request_id, *prompt, max_tokens=3, n=1):
    return Request(request_id, list(prompt or [10]), DecodingParams(max_tokens=max_tokens), n=n)


def with_engine(test, options=None, **arguments):
    """Run `await test(engine)` with an engine process; no process is left when it returns."""

    async def run():
        before = psutil.Process().children()
        engine = await AsyncEngine.start(options or {}, command=COMMAND, **arguments)
        try:
            return await test(engine)
        finally:
            await engine.shutdown(drain=False, timeout_s=1)
            assert psutil.Process().children() == before

    return asyncio.run(asyncio.wait_for(run(), 60))


async def collect(stream):
    async with stream:
        return [output async for output in stream]


def tokens_of(outputs, request_id, branch=0):
    return [
        token
        for output in outputs
        if (output.request_id, output.branch_index) == (request_id, branch)
        for token in output.token_ids
    ]


async def wait_until_free(engine):
    while (await engine.stats())["num_held_blocks"]:
        await asyncio.sleep(0.005)
