"""The engine for one's own loop, on a real engine process."""

import asyncio

import pytest

from quire.cli.engine_args import AsyncEngineArgs
from quire.core.adapters import LoRARequest
from quire.core.sampling_params import RequestOutputKind, SamplingParams
from quire.engine_client.async_llm import AsyncLLM
from quire.errors import ConfigurationError, EngineDeadError, InvalidRequestError
from quire.offline.llm import LLM

pytestmark = pytest.mark.usefixtures("forked_engines")

OPTIONS = {"dtype": "float32", "max_model_len": 128, "num_blocks": 64}


def params(kind: RequestOutputKind, **more: object) -> SamplingParams:
    fixed = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    return SamplingParams(**{**fixed, **more}, output_kind=kind)


async def use(engine: AsyncLLM) -> dict[str, list]:
    async def collect(name: str, wish: SamplingParams) -> list:
        return [output async for output in engine.generate("import os", wish, name)]

    wishes = {kind.name: params(kind) for kind in RequestOutputKind}
    found = await asyncio.gather(*(collect(name, wish) for name, wish in wishes.items()))
    stopped = await collect("stop", params(RequestOutputKind.FINAL_ONLY, stop="\n", n=2))
    assert [branch.stop_reason for branch in stopped[0].outputs] == ["\n", "\n"]
    endless = params(RequestOutputKind.CUMULATIVE, max_tokens=None)
    has_aborted = False
    async for output in engine.generate("x", endless, "abort"):
        # A reader that comes late finds several tokens at once, so no exact count is waited for.
        if len(output.outputs[0].token_ids) >= 3 and not has_aborted:
            has_aborted = True
            with pytest.raises(InvalidRequestError, match="'abort' is in use"):
                await anext(engine.generate("x", endless, "abort"))
            await engine.abort("abort")
    assert output.outputs[0].finish_reason == "abort"
    async for _ in engine.generate("x", endless, "left"):
        break
    await engine.check_health()
    with pytest.raises(InvalidRequestError, match="lora_request is 7, but must be a LoRARequest"):
        await anext(engine.generate("x", lora_request=7))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="enable_lora=True"):
        await anext(engine.generate("x", lora_request=LoRARequest("a", 1, "a")))
    with pytest.raises(AttributeError, match="AsyncLLM has no add_lora: each request names"):
        engine.add_lora  # noqa: B018 - the access is the test
    return dict(zip(wishes, found, strict=True))


async def pause(engine: AsyncLLM) -> None:
    """Requests under way stand still, wait or end; what comes meanwhile begins afterwards."""
    endless = params(RequestOutputKind.CUMULATIVE, max_tokens=None)
    whole = [
        each async for each in engine.generate("import os", params(RequestOutputKind.FINAL_ONLY))
    ]
    kept = engine.generate("x", endless)
    so_far = [await anext(kept)]
    await engine.pause_generation(mode="keep")
    assert await engine.is_paused()
    num_steps = (await engine.stats())["num_steps"]
    wish = params(RequestOutputKind.FINAL_ONLY)
    late = asyncio.ensure_future(anext(engine.generate("import os", wish)))
    await asyncio.sleep(0.05)
    assert (await engine.stats())["num_steps"] == num_steps and not late.done()
    await engine.resume_generation()
    assert (await late).outputs[0].token_ids == whole[0].outputs[0].token_ids
    await engine.pause_generation(mode="abort", clear_cache=False)
    so_far += [each async for each in kept]
    assert so_far[-1].outputs[0].finish_reason in ("abort", "length")  # or it had ended by itself
    await engine.resume_generation()
    waited = engine.generate("import os", params(RequestOutputKind.CUMULATIVE))
    so_far = [await anext(waited)]
    await engine.pause_generation(mode="wait")
    so_far += [each async for each in waited]  # none, where all of it came at once
    assert so_far[-1].finished
    await engine.resume_generation()
    again = await anext(engine.generate("import os", wish))
    assert again.num_cached_tokens == 0 and not await engine.is_paused()
    assert await engine.reset_prefix_cache()
    with pytest.raises(InvalidRequestError, match="mode is 'stop', but must be one of abort"):
        await engine.pause_generation(mode="stop")


async def run() -> dict[str, list]:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**OPTIONS))
    try:
        await pause(engine)
        return await use(engine)
    finally:
        await engine.shutdown()
        with pytest.raises(EngineDeadError, match="was shut down"):
            await anext(engine.generate("x"))


def test_results_come_as_each_request_wants_them() -> None:
    outputs = asyncio.run(run())
    whole = LLM(**OPTIONS).generate("import os", params(RequestOutputKind.DELTA), use_tqdm=False)
    expected = whole[0].outputs[0]
    for kind in ("CUMULATIVE", "FINAL_ONLY"):
        found = outputs[kind][-1].outputs[0]
        assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
        assert outputs[kind][-1].finished and len(found.logprobs) == 6
    assert len(outputs["FINAL_ONLY"]) == 1
    pieces = [output.outputs[0] for output in outputs["DELTA"]]
    assert "".join(piece.text for piece in pieces) == expected.text
    assert [token for piece in pieces for token in piece.token_ids] == expected.token_ids
    assert [len(piece.logprobs) for piece in pieces] == [len(piece.token_ids) for piece in pieces]


def test_bad_options_are_refused_before_a_process_is_started() -> None:
    with pytest.raises(ConfigurationError, match="max_num_seqs is 0"):
        AsyncLLM(max_num_seqs=0)
