"""A fleet of one engine on the fake engine's process, and what tests ask of it."""

import asyncio
from collections import deque

import psutil
from tests.engine_client.fake_engine_process import COMMAND
from tests.forking import shared_forks

from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.engine_client.fleet import EngineFleet
from quire.engine_client.one_engine import start_one_engine

ENDLESS = 10**9


def engines():
    """The engine processes that this one has, which the fixture `forked_engines` lets fork."""
    forks = shared_forks().running()
    return [psutil.Process(fork.pid) for fork in forks if COMMAND[1] in fork.words]


def own_processes():
    """The ids of all processes that this one has started and that have not ended."""
    forks = shared_forks().running()
    return [process.pid for process in (*psutil.Process().children(), *forks)]


def pid_of(engine):
    """The process id of a fleet's only engine; None while there is no process."""
    return engine.engines_by_name[""].pid if engine.engines_by_name else None


def request(request_id, *prompt, max_tokens=3, n=1):
    return Request(request_id, list(prompt or [10]), DecodingParams(max_tokens=max_tokens), n=n)


def with_engine(test, options=None, **arguments):
    """Run `await test(engine)` with an engine process; no process is left when it returns."""

    async def run():
        before = own_processes()
        engine = await start_one_engine(options or {}, command=COMMAND, **arguments)
        try:
            return await test(engine)
        finally:
            await engine.shutdown(drain=False, timeout_s=1)
            assert own_processes() == before

    return asyncio.run(asyncio.wait_for(run(), 60))


class Pulled:
    """A sink whose outputs are pulled with `async for`. Leaving its `async with` closes the stream.

    Raises what ended the stream, after the outputs that had come.
    """

    def __init__(self):
        self.stream = None
        self._outputs = deque()
        self._end = None
        self._news = asyncio.Event()

    def on_output(self, output):
        assert self._end is None, "an output after the end"
        self._outputs.append(output)
        self._news.set()

    def on_end(self, error):
        assert self._end is None, "two ends"
        self._end = StopAsyncIteration() if error is None else error
        self._news.set()

    def abort_branch(self, request_id, branch_index):
        self.stream.abort_branch(request_id, branch_index)

    def close(self):
        self.stream.close()
        self._outputs.clear()

    def __aiter__(self):
        return self

    async def __anext__(self):
        while not self._outputs:
            if self._end is not None:
                raise self._end.with_traceback(None)  # one error may end several streams
            self._news.clear()
            await self._news.wait()
        return self._outputs.popleft()

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self.close()


def pull(engine, *requests):
    """The outputs of requests to a fleet, or to its dispatcher, to be pulled."""
    open_ = engine.generate if isinstance(engine, EngineFleet) else engine.open
    pulled = Pulled()
    pulled.stream = open_(requests, pulled)
    return pulled


async def collect(pulled):
    async with pulled:
        return [output async for output in pulled]


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
