"""The engine in one's own event loop: several streams at once, one of them given up half-way.

The engine is a process of its own; nothing in it can stall the loop.

    python examples/async_engine.py
"""

import asyncio

from quire import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams

PROMPTS = ("import os", "def main():", "class Node:")


async def stream(engine: AsyncLLM, name: str, prompt: str, max_pieces: int | None = None) -> None:
    """Print a text when it has ended, or when it is aborted after `max_pieces` pieces."""
    params = SamplingParams(
        temperature=0.7, seed=1, max_tokens=24, output_kind=RequestOutputKind.DELTA
    )
    text, num_pieces = prompt, 0
    async for output in engine.generate(prompt, params, request_id=name):
        text += output.outputs[0].text
        num_pieces += 1
        if num_pieces == max_pieces:
            await engine.abort(name)  # its memory is free before the next step
            break
    print(f"--- {name}: {num_pieces} pieces\n{text}")


async def main() -> None:
    """Run all prompts together."""
    args = AsyncEngineArgs(dtype="float32", max_num_seqs=8, max_model_len=512)
    engine = AsyncLLM.from_engine_args(args)
    try:
        async with asyncio.TaskGroup() as group:
            for number, prompt in enumerate(PROMPTS):
                is_last = number == len(PROMPTS) - 1
                group.create_task(stream(engine, f"story-{number}", prompt, 5 if is_last else None))
    finally:
        await engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
