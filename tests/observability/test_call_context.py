"""A call is found wherever code runs for it, and nowhere else."""

import asyncio

from quire.observability.log import CallContext, begin_call, current_call


def test_tasks_and_threads_of_a_call_find_it_and_others_do_not() -> None:
    async def serve(name: str) -> list[str | None]:
        begin_call(CallContext(name))
        await asyncio.sleep(0)

        async def inner() -> str | None:
            call = current_call()
            return None if call is None else call.request_id

        in_thread = await asyncio.to_thread(current_call)
        assert in_thread is current_call()
        return [await inner(), await asyncio.ensure_future(inner())]

    async def both() -> list[list[str | None]]:
        return await asyncio.gather(serve("a"), serve("b"))

    assert asyncio.run(both()) == [["a", "a"], ["b", "b"]]
    assert current_call() is None


def test_notes_of_a_task_are_seen_by_its_caller() -> None:
    async def work() -> None:
        call = current_call()
        assert call is not None
        call.num_output_tokens += 3

    async def serve() -> int:
        call = CallContext("a")
        begin_call(call)
        await asyncio.ensure_future(work())
        return call.num_output_tokens

    assert asyncio.run(serve()) == 3
