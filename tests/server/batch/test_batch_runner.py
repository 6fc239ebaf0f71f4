"""The runner of batches with an application that answers at once: ends, faults and tenants."""

import asyncio
import errno
import json
from types import SimpleNamespace

import pytest

from quire.engine_client.recovery import EngineState
from quire.server.batch import background
from quire.server.batch.background import ADDED_PRIORITY, BatchRunner
from quire.server.batch.batch_book import BatchBook
from quire.server.batch.engine_load import EngineLoad
from quire.server.generation.answer_store import Owner
from quire.server.served_models import ServedModels
from quire.server.tenants.tenants import Tenant

ALICE, BOB = Owner("alice"), Owner("bob")
WAIT_S = 60
ENDPOINT = "/v1/completions"


def line(number, body='{"prompt": "a"}'):
    return f'{{"custom_id": "call-{number}", "url": "{ENDPOINT}", "body": {body}}}\n'.encode()


class World:
    """A book of batches, and a runner whose calls are answered by `answer`."""

    def __init__(self, folder, find_tenant=Tenant):
        self.now_s = 1000.0
        self.calls = []
        self.book = BatchBook(
            folder, max_file_bytes=1 << 20, max_tenant_bytes=1 << 20, clock=lambda: self.now_s
        )
        self._find_tenant = find_tenant

    async def answer(self, scope, receive, send):
        body = (await receive())["body"]
        self.calls.append(SimpleNamespace(state=scope["state"], body=body))
        if b"wait" in body:
            await asyncio.Event().wait()
        if b"bug" in body:
            raise ZeroDivisionError
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def begin(self, *lines, owner=ALICE):
        path = self.book.files.path_of("file-new").with_suffix(".part")
        path.write_bytes(b"".join(lines))
        file_id = f"file-{len(list(self.book.files._folder.iterdir())):032x}"
        self.book.files.add(owner, path, file_id, "calls.jsonl", "batch")
        return self.book.create(owner, ENDPOINT, file_id, 3600, None)

    def run(self, until):
        """Run until the condition holds."""
        engine = SimpleNamespace(
            facts={"max_num_seqs": 5},
            num_open=0,
            state=EngineState.READY,
            sleeping=SimpleNamespace(is_on=False, on_wanted=None),
        )

        service = SimpleNamespace(engine=engine, model_names=("m",), created_s=0)
        load = EngineLoad(ServedModels.of(service))

        async def main():
            runner = BatchRunner(
                self.answer, load, self.book, self._find_tenant, lambda: self.now_s
            )
            task = asyncio.create_task(runner.run())
            async with asyncio.timeout(WAIT_S):
                while not until():
                    assert not task.done(), task.result()
                    await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        asyncio.run(main())

    def lines(self, owner, file_id):
        assert self.book.files.find(owner, file_id)
        text = self.book.files.path_of(file_id).read_text()
        return {each["custom_id"]: each for each in map(json.loads, text.splitlines())}


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_a_batch_expires_with_a_line_for_each_call_without_an_answer(world):
    batch = world.begin(line(0), *(line(n, '{"prompt": "wait"}') for n in range(1, 9)))
    world.run(lambda: len(world.calls) == 5 and batch.request_counts.completed == 1)
    assert batch.status == "in_progress"
    world.now_s += 3600
    world.run(lambda: batch.has_ended)
    assert (batch.status, batch.expired_at) == ("expired", 4600)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 8)
    assert set(world.lines(ALICE, batch.output_file_id)) == {"call-0"}
    errors = world.lines(ALICE, batch.error_file_id)
    assert set(errors) == {f"call-{n}" for n in range(1, 9)}
    assert {each["error"]["code"] for each in errors.values()} == {"batch_expired"}


def test_open_calls_of_an_expiring_batch_are_not_lost(world):
    batch = world.begin(*(line(n, '{"prompt": "wait"}') for n in range(3)))

    def expires():
        world.now_s += 3600 * bool(world.calls)
        return batch.has_ended

    world.run(expires)
    assert batch.request_counts.failed == 3


def test_calls_bring_the_priority_that_engines_add_where_their_policy_reads_it(world):
    batch = world.begin(line(0))
    world.run(lambda: batch.has_ended)
    (call,) = world.calls
    assert call.state["added_priority"] == ADDED_PRIORITY
    assert (call.state["tenant"].name, call.state["is_operator"]) == ("alice", False)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "\xff"}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "\\ud800"}',
    ],
    ids=["no UTF-8", "deep", "surrogate"],
)
def test_a_poisoned_file_fails_alone(world, body):
    poisoned = line(1, "BODY").replace(b"BODY", body)
    batch, other = world.begin(line(0), poisoned), world.begin(line(0), owner=BOB)
    world.run(lambda: batch.has_ended and other.has_ended)
    assert (batch.status, other.status) == ("failed", "completed")
    (error,) = batch.errors.data
    assert "line 2 of" in error.message and "is no call" in error.message


def test_a_bug_ends_its_batch_alone(world):
    batch, other = world.begin(line(0, '{"prompt": "bug"}')), world.begin(line(0), owner=BOB)
    world.run(lambda: batch.has_ended and other.has_ended)
    assert (batch.status, other.status) == ("failed", "completed")
    assert batch.errors.data[0].message == background.UNUSABLE


def test_the_number_of_calls_is_bounded(world, monkeypatch):
    monkeypatch.setattr(background, "MAX_CALLS", 2)
    batch = world.begin(*map(line, range(3)))
    world.run(lambda: batch.has_ended)
    assert "has more than 2 calls" in batch.errors.data[0].message


def test_one_tenant_s_further_batches_wait_while_others_go_on(world, monkeypatch):
    monkeypatch.setattr(background, "MAX_OPEN_JOBS", 2)
    waiting = [world.begin(line(0, '{"prompt": "wait"}')) for _ in range(3)]
    other = world.begin(line(0), owner=BOB)
    world.run(lambda: other.has_ended)
    assert [each.status for each in waiting] == ["in_progress", "in_progress", "validating"]
    world.book.cancel(waiting[2])
    world.run(lambda: waiting[2].has_ended)
    assert waiting[2].status == "cancelled"


def test_calls_have_their_tenant_s_settings_and_end_with_its_key(tmp_path):
    tenants = {"alice": Tenant("alice", speculation_history=False)}
    world = World(tmp_path, tenants.get)
    batch, keyless = world.begin(line(0)), world.begin(line(0), owner=BOB)
    world.run(lambda: batch.has_ended and keyless.status == "in_progress")
    (call,) = world.calls
    assert call.state["tenant"].speculation_history is False
    tenants["bob"] = Tenant("bob")
    world.run(lambda: keyless.has_ended)
    assert keyless.status == "completed"


def test_a_batch_waits_while_its_answers_fill_the_tenant_s_room(world):
    batch, files = world.begin(*map(line, range(20))), world.book.files
    files.max_tenant_bytes = 4096 + 2000
    answers, _ = world.book.working_paths(batch)
    world.run(lambda: answers.exists() and not files.has_room(ALICE, answers.stat().st_size))
    num_answered = batch.request_counts.completed
    assert batch.status == "in_progress" and 0 < num_answered < 20
    other = world.begin(line(0), owner=BOB)
    world.run(lambda: other.has_ended)
    assert batch.request_counts.completed == num_answered, "nor does it go on after a restart"
    world.book.files.max_tenant_bytes = 20_000
    world.run(lambda: batch.has_ended)
    assert (batch.status, batch.request_counts.completed) == ("completed", 20)


@pytest.mark.parametrize("when", ["begin", "answer", "finalizing", "publish"])
def test_a_batch_goes_on_once_the_full_disk_has_room(world, monkeypatch, when):
    monkeypatch.setattr(background, "DISK_RETRY_S", 0.2)
    batch, faults = world.begin(line(0), line(1)), []
    full = OSError(errno.ENOSPC, "No space left on device")

    def fails_once(owner, name, is_due):
        real = getattr(owner, name)

        def call(*arguments, **named):
            if not faults and is_due(arguments):
                faults.append(arguments)
                raise full
            return real(*arguments, **named)

        monkeypatch.setattr(owner, name, call)

    if when == "answer":
        fails_once(background.BatchOutput, "write", lambda _: True)
    elif when == "publish":
        fails_once(world.book.files, "add", lambda _: True)
    else:
        status = {"begin": "in_progress", "finalizing": "finalizing"}[when]
        fails_once(world.book, "set_status", lambda given: given[1] == status)
    world.run(lambda: batch.has_ended)
    assert (batch.status, batch.request_counts.completed, len(faults)) == ("completed", 2, 1)
    assert set(world.lines(ALICE, batch.output_file_id)) == {"call-0", "call-1"}


@pytest.mark.parametrize("ends_by", ["cancelled", "expired"])
def test_published_answers_outlive_a_crash_before_the_last_status(tmp_path, monkeypatch, ends_by):
    world = World(tmp_path)
    batch = world.begin(line(0), line(1, '{"prompt": "wait"}'))
    world.run(lambda: batch.request_counts.completed == 1)
    set_status = world.book.set_status

    def crash(given, status):
        if status == ends_by:
            raise ZeroDivisionError
        set_status(given, status)

    monkeypatch.setattr(world.book, "set_status", crash)
    if ends_by == "cancelled":
        world.book.cancel(batch)
    else:
        world.now_s += 3600
    with pytest.raises(ZeroDivisionError):
        world.run(lambda: False)
    world.book.close()
    again = World(tmp_path)
    again.now_s = world.now_s
    (batch,) = again.book.unfinished()
    again.run(lambda: batch.has_ended)
    assert batch.status == ends_by
    assert set(again.lines(ALICE, batch.output_file_id)) == {"call-0"}
