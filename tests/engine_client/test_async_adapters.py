"""Adapters of an engine process: found, changed, broken, and there again after kill -9."""

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.adapters.embedded import save_adapter

from quire.core.adapters import LoRARequest
from quire.core.sampling_params import RequestOutputKind, SamplingParams
from quire.engine_client.async_llm import AsyncLLM
from quire.errors import AdapterError, InvalidRequestError
from quire.offline.llm import LLM

pytestmark = pytest.mark.usefixtures("forked_engines")

OPTIONS = {
    "dtype": "float32",
    "max_model_len": 256,
    "num_blocks": 128,
    "enable_lora": True,
    "max_loras": 1,
    "max_lora_rank": 4,
    "max_cpu_loras": 1,
}
PROMPT = "import os\n\n\ndef main(path):\n    for name in os.listdir(path):\n"
WISH = SamplingParams(
    temperature=0, max_tokens=160, ignore_eos=True, output_kind=RequestOutputKind.CUMULATIVE
)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> list[LoRARequest]:
    root = tmp_path_factory.mktemp("adapters")
    return [
        LoRARequest(f"a{seed}", seed + 1, str(save_adapter(root / f"a{seed}", seed)))
        for seed in range(2)
    ]


@pytest.fixture(scope="module")
def expected(adapters) -> list[list[int]]:
    """Of each adapter, and of the base model."""
    llm = LLM(**OPTIONS)
    wish = WISH.clone()
    outputs = [llm.generate(PROMPT, wish, False, each)[0] for each in [*adapters, None]]
    return [list(output.outputs[0].token_ids) for output in outputs]


async def last(engine: AsyncLLM, adapter: LoRARequest | None) -> list[int]:
    async for output in engine.generate(PROMPT, WISH, lora_request=adapter):
        assert output.lora_request is adapter
    return list(output.outputs[0].token_ids)


async def kill_under(engine: AsyncLLM, adapter: LoRARequest) -> list[int]:
    """The tokens of a stream whose engine process is killed in the middle of it."""
    inner = (await engine._started()).engines_by_name[""]
    first_pid = inner.pid
    async for output in engine.generate(PROMPT, WISH, lora_request=adapter):
        if inner.pid == first_pid and len(output.outputs[0].token_ids) >= 1:
            assert first_pid is not None
            os.kill(first_pid, signal.SIGKILL)
            first_pid = None
    assert inner.num_restarts == 1
    return list(output.outputs[0].token_ids)


async def use(adapters, expected, folder: Path) -> None:
    async with AsyncLLM(**OPTIONS) as engine:
        crowd = [*adapters, None, *adapters]
        found = await asyncio.gather(*(last(engine, each) for each in crowd))
        assert found == [*expected, *expected[:2]]
        with pytest.raises(AdapterError, match="adapter 'gone': it is not a folder"):
            await last(engine, LoRARequest("gone", 9, str(folder / "gone")))
        assert await kill_under(engine, adapters[1]) == expected[1]
        assert await last(engine, adapters[0]) == expected[0], "the new process reads it again"
        listed: Any = [adapters[0]]  # as LLM.generate takes it
        outputs = [each async for each in engine.generate(PROMPT, WISH, lora_request=listed)]
        assert list(outputs[-1].outputs[0].token_ids) == expected[0]
        own = LoRARequest("own", 3, str(folder / "own"))
        shutil.copytree(adapters[0].lora_path, own.lora_path)
        assert await last(engine, own) == expected[0]
        shutil.copytree(adapters[1].lora_path, own.lora_path, dirs_exist_ok=True)
        os.utime(folder / "own" / "adapter_config.json", ns=(7, 7))
        assert await last(engine, own) == expected[1], "nothing stale"
        counts = (await engine.stats())["adapters"]
        assert counts["num_resident"] == 1 and counts["num_loads"] >= 2


async def lose(adapters, expected, folder: Path) -> None:
    """The files change between a request's begin and the death of its process."""
    async with AsyncLLM(**OPTIONS) as engine:
        own = LoRARequest("own", 3, str(folder / "own"))
        shutil.copytree(adapters[0].lora_path, own.lora_path)
        inner, pid = (await engine._started()).engines_by_name[""], None
        outputs = []
        async for output in engine.generate(PROMPT, WISH, lora_request=own):
            outputs.append(output)
            if pid is None:
                pid = inner.pid
                shutil.copytree(adapters[1].lora_path, own.lora_path, dirs_exist_ok=True)
                os.kill(pid, signal.SIGKILL)
        assert outputs[-1].outputs[0].finish_reason == "error"
        assert "its files were changed since it was loaded" in outputs[-1].error
        got = list(outputs[-1].outputs[0].token_ids)
        assert got == expected[0][: len(got)]
        assert await last(engine, None) == expected[2]


def test_adapters_of_a_process(adapters, expected, tmp_path):
    asyncio.run(use(adapters, expected, tmp_path))


def test_a_stream_gets_no_other_adapter_s_tokens_after_a_crash(adapters, expected, tmp_path):
    asyncio.run(lose(adapters, expected, tmp_path))


def test_a_process_without_adapters_says_so(adapters):
    async def ask() -> None:
        async with AsyncLLM(max_model_len=64, num_blocks=16) as engine:
            with pytest.raises(InvalidRequestError, match="enable_lora=True"):
                await last(engine, adapters[0])

    asyncio.run(ask())
