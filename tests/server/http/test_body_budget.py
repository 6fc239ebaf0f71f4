"""How many bytes of bodies may be under way, on a clock of its own; few are parsed at once."""

import asyncio

import pytest
from tests.server.asgi import JSON, call, parts_of

from quire.errors import TenantBusyError, UploadsFullError
from quire.server.http.body_budget import (
    FREE_BYTES,
    LONG_AT_ONCE,
    PROGRESS_BYTES,
    SLOW_S,
    VERY_LONG_AT_ONCE,
    VERY_LONG_BYTES,
    BodyBudget,
    ParseTurns,
)
from quire.server.http.guard import BodyLimit
from quire.server.http.json_body import LONG_BODY_BYTES
from quire.server.tenants.tenants import Tenant


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def uploading(budget, tenant, num_bytes):
    """An upload that has brought so many bytes, beyond those that count for nothing, and is not
    whole; `cuts` is filled when it is cut."""
    upload = budget.open(tenant)
    upload.cuts = []
    upload.on_cut = lambda: upload.cuts.append(True)
    upload.count_bytes(FREE_BYTES + num_bytes)
    return upload


def test_bytes_count_from_their_arrival_until_the_call_is_answered():
    budget = BodyBudget()
    first, second = uploading(budget, "", 100), uploading(budget, "", 20)
    assert budget.num_bytes == 120
    first.count_bytes(5)
    first.end()
    assert budget.num_bytes == 125
    first.close()
    first.close()
    second.close()
    assert budget.num_bytes == 0


def test_short_bodies_always_have_room():
    budget = BodyBudget(max_bytes=1000, max_tenant_bytes=1000)
    uploading(budget, "alice", 1000)
    short = budget.open("alice")
    short.expect(FREE_BYTES)
    short.count_bytes(FREE_BYTES)
    assert budget.num_bytes == 1000


def test_the_server_and_each_tenant_have_bounds():
    budget = BodyBudget(max_bytes=1000, max_tenant_bytes=600)
    alice = uploading(budget, "alice", 600)
    with pytest.raises(TenantBusyError, match="'alice' may have 600 bytes of long bodies"):
        alice.count_bytes(1)
    uploading(budget, "bob", 400)
    with pytest.raises(UploadsFullError):
        uploading(budget, "carol", 1)
    with pytest.raises(UploadsFullError):
        budget.open("carol").expect(FREE_BYTES + 1)
    assert budget.num_bytes == 1000
    alice.close()
    uploading(budget, "carol", 600)


def test_without_keys_only_the_server_has_a_bound():
    budget = BodyBudget(max_bytes=1000, max_tenant_bytes=600)
    assert uploading(budget, "", 1000).num_counted == 1000


def test_an_upload_that_has_stopped_gives_its_room_to_another():
    clock = Clock()
    budget = BodyBudget(max_bytes=1000, clock=clock)
    stopped, whole = uploading(budget, "alice", 600), uploading(budget, "alice", 200)
    whole.end()
    with pytest.raises(UploadsFullError):
        uploading(budget, "bob", 300)
    clock.now_s += SLOW_S
    uploading(budget, "bob", 300)
    assert (stopped.cuts, whole.cuts, budget.num_bytes) == ([True], [], 500)
    with pytest.raises(UploadsFullError):
        uploading(budget, "carol", 600)  # one that is whole is not cut


def test_a_tenant_s_room_is_made_of_its_own_uploads_alone():
    clock = Clock()
    budget = BodyBudget(max_bytes=2000, max_tenant_bytes=1000, clock=clock)
    bob, alice = uploading(budget, "bob", 1000), uploading(budget, "alice", 1000)
    clock.now_s += SLOW_S
    uploading(budget, "alice", 10)
    assert (bob.cuts, alice.cuts) == ([], [True])


def test_drops_that_keep_coming_make_no_upload_fast():
    clock = Clock()
    budget = BodyBudget(max_bytes=4 * PROGRESS_BYTES, clock=clock)
    slow, fast = uploading(budget, "", 100), uploading(budget, "", PROGRESS_BYTES)
    for _ in range(int(SLOW_S)):
        clock.now_s += 1
        slow.count_bytes(1)
        fast.count_bytes(PROGRESS_BYTES // 2)
    uploading(budget, "", PROGRESS_BYTES)
    assert (slow.cuts, fast.cuts) == ([True], [])


class Reader:
    """An application that reads its body and then waits until it may answer."""

    def __init__(self):
        self.may_answer = asyncio.Event()
        self.has_body = asyncio.Event()

    async def __call__(self, scope, receive, send):
        while (await receive())["more_body"]:
            pass
        self.has_body.set()
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def test_a_call_holds_its_room_until_it_is_answered():
    async def play():
        budget, inner, sent = BodyBudget(max_bytes=1000), Reader(), []
        pending = parts_of(b"x" * (FREE_BYTES + 900), 7)

        async def receive():
            return pending.pop(0)

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "headers": [], "state": {"tenant": Tenant("alice")}}
        task = asyncio.create_task(BodyLimit(inner, budget=budget)(scope, receive, send))
        await inner.has_body.wait()
        assert budget.num_bytes == 900
        inner.may_answer.set()
        await task
        assert budget.num_bytes == 0 and sent[0]["status"] == 200

    asyncio.run(play())


def test_a_call_whose_announced_body_has_no_room_is_refused_unread():
    budget = BodyBudget(max_bytes=1000)
    uploading(budget, "", 900)
    headers = [JSON, (b"content-length", str(FREE_BYTES + 101).encode())]
    answer = call(BodyLimit(Reader(), budget=budget), "/", headers=headers)
    assert (answer.status, answer.error["code"], answer.num_received) == (503, "uploads_full", 0)
    assert answer.headers["retry-after"] == "1"
    assert budget.num_bytes == 900


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (LONG_BODY_BYTES, 20),
        (LONG_BODY_BYTES + 1, LONG_AT_ONCE),
        (VERY_LONG_BYTES + 1, VERY_LONG_AT_ONCE),
    ],
)
def test_few_long_bodies_are_parsed_at_once(num_bytes, expected):
    async def play():
        turns, num_now, most = ParseTurns(), 0, 0

        async def parse():
            nonlocal num_now, most
            async with turns.turn(num_bytes):
                num_now += 1
                most = max(most, num_now)
                await asyncio.sleep(0)
                num_now -= 1

        await asyncio.gather(*(parse() for _ in range(20)))
        assert most == expected

    asyncio.run(play())
