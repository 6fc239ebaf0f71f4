"""kill -9 of the engine under calls that embed and rerank: their clients wait, and get the same."""

import asyncio
import os
import signal

import httpx
from tests.server.launching import WAIT_S, launched

LONG = "import os\n" * 30
CALLS = [
    ("/v1/embeddings", {"input": [f"x = {i}\n{LONG}" for i in range(12)]}),
    ("/rerank", {"query": "os", "documents": [f"{LONG}y = {i}" for i in range(12)]}),
]


async def ask(server, kills):
    async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S) as client:
        answers = [asyncio.ensure_future(client.post(path, json=body)) for path, body in CALLS]
        if kills:
            while (await client.get("/health")).json()["num_open"] < 20:
                await asyncio.sleep(0.01)
            os.kill((await asyncio.to_thread(server.current_engine)).pid, signal.SIGKILL)
        return [(await answer).json() for answer in answers]


def test_the_same_vectors_and_scores_after_a_crash():
    options = {"num_blocks": 512, "max_num_seqs": 8, "max_model_len": 1024}
    options |= {"max_num_batched_tokens": 64, "enable_prefix_caching": False}
    with launched(options) as server:
        expected = asyncio.run(ask(server, kills=False))
        found = asyncio.run(ask(server, kills=True))
        assert server.http.get("/health").json()["num_restarts"] == 1
        assert found[0]["data"] == expected[0]["data"] and len(found[0]["data"]) == 12
        assert found[1]["results"] == expected[1]["results"]
        server.wait_until(lambda stats: stats["num_held_blocks"] == 0)
