"""The engine process's loop, driven through a real socket pair, with a fake engine."""

import contextlib
import socket
import threading

import pytest
from tests.engine_client import fake_engine_process as fake
from tests.engine_process.api_server import WAIT_S, ApiServer, request, tokens_of

from quire import ipc
from quire.core.content_spans import Content
from quire.core.request import FinishReason, Request, ResumedBranch
from quire.core.sampling_params import DecodingParams
from quire.engine_client.messages import (
    PIECE_BYTES,
    AbortRequest,
    AddRequest,
    BlocksReply,
    ClearPrefixes,
    ContentValues,
    Fatal,
    GetBlocks,
    GetMemory,
    GetStats,
    MemoryReply,
    Outputs,
    Ping,
    Pong,
    Progress,
    Ready,
    RequestFailed,
    SetPaused,
    Shutdown,
    Start,
    StatsReply,
    decode_to_engine,
    frames_of,
)
from quire.engine_process import engine_loop
from quire.engine_process.engine_loop import (
    ArrivingContents,
    Channel,
    EngineLoop,
    build_and_serve,
)
from quire.ipc import MessageError, PeerGoneError, encode


@contextlib.contextmanager
def served(build=fake.build, options=None):
    """A thread that runs build_and_serve, as (server, result list). The server has sent Start."""
    ours, theirs = socket.socketpair()
    codes = []

    def run():
        with theirs:
            codes.append(build_and_serve(theirs, build))

    thread = threading.Thread(target=run)
    thread.start()
    with ours:
        server = ApiServer(ours)
        server.send(Start(options or {}))
        yield server, codes
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_ready_comes_first_then_tokens_up_to_the_end():
    with served() as (server, codes):
        engine = fake.FakeEngine({})
        assert server.receive() == Ready(engine.limits, engine.facts)
        server.send(AddRequest(request("a", 10)), Shutdown(drain=True))
        received = server.receive_all()
    assert tokens_of(received, "a") == [11, 12, 13]
    assert received[-1].outputs[-1].finish_reason is FinishReason.LENGTH
    assert codes == [0]


def test_progress_of_the_build_comes_before_ready():
    with served(options={"num_progress": 2}) as (server, codes):
        assert server.receive() == Progress("loading nothing", 1, 2)
        assert server.receive() == Progress("loading nothing", 2, 2)
        assert isinstance(server.receive(), Ready)
    assert codes == [0]


def test_a_resumed_request_gets_the_missing_tokens_of_its_named_branches():
    with served() as (server, _):
        server.receive()
        resumed = (ResumedBranch(1, (11, 12)), ResumedBranch(2))
        server.send(AddRequest(Request("a", [10], DecodingParams(4), n=3, resumed=resumed)))
        server.send(Shutdown(drain=True))
        received = server.receive_all()
    assert tokens_of(received, "a", 0) == []
    assert tokens_of(received, "a", 1) == [13, 14]
    assert tokens_of(received, "a", 2) == [11, 12, 13, 14]


def test_a_ping_is_answered_between_two_steps():
    with served(options={"step_s": 0.02}) as (server, _):
        server.receive()
        server.send(AddRequest(request("a", max_tokens=10**9)), Ping(), GetStats(), Ping())
        received = [server.receive()]
        while sum(isinstance(message, Pong) for message in received) < 2:
            received.append(server.receive())
        answers = [message for message in received if not isinstance(message, Outputs)]
        assert [type(message) for message in answers] == [Pong, StatsReply, Pong]
        server.send(Shutdown(drain=False))


def test_a_paused_engine_takes_no_step():
    with served() as (server, codes):
        server.receive()
        server.send(SetPaused(True), AddRequest(request("a")), ClearPrefixes(), GetStats())
        reply = server.receive()
        assert (reply.stats["num_running"], reply.stats["num_steps"]) == (1, 0)
        assert reply.stats["aborted"] == ["prefixes"]
        server.send(SetPaused(False))
        assert tokens_of([server.receive()], "a") == [11]
        server.send(SetPaused(True), AddRequest(request("b")), Shutdown(drain=True))
        received = server.receive_all()
    assert tokens_of(received, "a")[-1:] == [13] and tokens_of(received, "b") == [11, 12, 13]
    assert codes == [0]


def test_one_message_per_step_has_the_outputs_of_all_sequences():
    with served() as (server, _):
        server.receive()
        adds = [AddRequest(request(f"r{index}", index, n=2)) for index in range(1, 9)]
        server.send(*adds, Shutdown(drain=True))
        received = server.receive_all()
    full = [message for message in received if len(message.outputs) == 16]
    assert len(received) <= 3 + 8  # three steps of all, and at most a ramp while they come in
    assert full
    for index in range(1, 9):
        for branch in (0, 1):
            assert tokens_of(received, f"r{index}", branch) == [index + 1, index + 2, index + 3]


def test_a_bad_request_is_refused_and_the_others_go_on():
    with served() as (server, _):
        server.receive()
        bad = request("bad", fake.REFUSE)
        server.send(AddRequest(request("a")), AddRequest(bad), AddRequest(request("b")))
        server.send(Shutdown(drain=True))
        received = server.receive_all()
    failures = [message for message in received if isinstance(message, RequestFailed)]
    assert failures == [
        RequestFailed("bad", "context_length_exceeded", "the prompt is refused", 400, "prompt")
    ]
    assert tokens_of(received, "a") == tokens_of(received, "b") == [11, 12, 13]


def test_an_abort_takes_effect_before_the_next_step():
    with served() as (server, _):
        server.receive()
        server.send(
            AddRequest(request("a", max_tokens=10_000, n=2)),
            AbortRequest("a", 1),
            AbortRequest("unheard-of"),
            GetStats(),
        )
        stats = server.receive()
        while not isinstance(stats, StatsReply):
            stats = server.receive()
        assert stats.stats["aborted"] == [["a", 1]]
        assert stats.stats["num_held_blocks"] == 1
        server.send(AbortRequest("a"), GetStats())
        while not isinstance(stats := server.receive(), StatsReply):
            pass
        assert stats.stats["num_held_blocks"] == 0
        server.send(Shutdown(drain=True))
        assert server.receive() is None


def test_questions_are_answered_in_their_order():
    with served() as (server, _):
        server.receive()
        server.send(GetMemory(), GetStats(), GetBlocks(8, 3), GetBlocks(10, 3))
        memory, stats, blocks, rest = (server.receive() for _ in range(4))
        assert isinstance(memory, MemoryReply) and isinstance(stats, StatsReply)
        assert memory.memory["total_bytes"] == memory.memory["free_bytes"] == 12 * 64
        assert isinstance(blocks, BlocksReply) and isinstance(rest, BlocksReply)
        assert [one["block"] for one in blocks.page["blocks"]] == [8, 9, 10]
        assert (blocks.page["next_block"], rest.page["next_block"]) == (11, None)
        server.send(Shutdown(drain=False))


def test_requests_that_arrive_during_a_drain_are_ignored():
    with served(options={"step_s": 0.01}) as (server, codes):
        server.receive()
        server.send(AddRequest(request("a", max_tokens=5)), Shutdown(drain=True))
        server.send(AddRequest(request("late")))
        received = server.receive_all()
    assert not any(isinstance(message, RequestFailed) for message in received)
    assert tokens_of(received, "late") == []
    assert tokens_of(received, "a") == [11, 12, 13, 14, 15]
    assert codes == [0]


def test_shutdown_without_draining_ends_at_once():
    with served() as (server, codes):
        server.receive()
        server.send(AddRequest(request("a", max_tokens=10**9)), Shutdown(drain=False))
        server.receive_all()
    assert codes == [0]


def test_an_engine_that_cannot_be_built_says_why():
    with served(options={"fail": "no config.json in /x"}) as (server, codes):
        assert server.receive_all() == [Fatal("checkpoint_error", "no config.json in /x")]
    assert codes == [1]


def test_an_unexpected_exception_is_fatal_and_reported(caplog):
    with served() as (server, codes):
        server.receive()
        server.send(AddRequest(request("a", fake.RAISE)))
        fatal = server.receive_all()[-1]
    assert fatal == Fatal("internal_error", "RuntimeError: the step went wrong")
    assert codes == [1]
    assert "the step went wrong" in caplog.text


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (encode(GetStats()), "must be its options"),
        (encode(Start({})) + encode(Start({})), "must be its options"),
        (b"\x00\x00\x00\x01\xc1", "not a message from the API server"),
        (b"\xff\xff\xff\xff", "above the bound"),
    ],
)
def test_a_first_message_that_is_not_the_options_is_fatal(first, reason):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(first)
        assert build_and_serve(theirs, fake.build) == 1
        fatal = ApiServer(ours).receive()
    assert fatal.code == MessageError.code
    assert reason in fatal.message


def test_options_sent_twice_are_refused():
    with served() as (server, codes):
        server.receive()
        server.send(Start({}))
        assert "options twice" in server.receive().message
    assert codes == [1]


@pytest.mark.parametrize("max_tokens", [1, 10**9])
def test_the_end_of_the_stream_ends_the_loop(max_tokens):
    with served() as (server, codes):
        server.receive()
        server.send(AddRequest(request("a", max_tokens=max_tokens)))
        server.receive()
    assert codes == [0]


def test_unread_outputs_stop_the_steps_but_not_the_reading_of_messages(monkeypatch):
    monkeypatch.setattr(engine_loop, "MAX_BACKLOG_BYTES", 1000)
    engines = []

    def build(options, on_progress):
        engines.append(fake.FakeEngine(options))
        return engines[0]

    ours, theirs = socket.socketpair()
    with ours, theirs:
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        thread = threading.Thread(target=build_and_serve, args=(theirs, build))
        thread.start()
        ours.sendall(encode(Start({})))
        assert isinstance(ApiServer(ours).receive(), Ready)
        ours.sendall(encode(AddRequest(request("a", max_tokens=10**9))))
        idle = threading.Event()
        steps = -1
        while engines[0].num_steps != steps:  # until the steps have stopped
            steps = engines[0].num_steps
            idle.wait(0.1)
        assert 0 < steps < 10_000
        ours.sendall(encode(AbortRequest("a")))
        while engines[0].running:
            idle.wait(0.01)
        ours.close()
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_outputs_too_long_for_a_message_end_their_request_alone(monkeypatch):
    monkeypatch.setattr(ipc, "MAX_MESSAGE_BYTES", 5000)
    monkeypatch.setattr(fake, "HUGE_TOKENS", 6000)
    with served() as (server, codes):
        server.receive()
        server.send(AddRequest(request("huge", fake.HUGE)), AddRequest(request("a")))
        server.send(Shutdown(drain=True))
        received = server.receive_all()
    (failure,) = [message for message in received if isinstance(message, RequestFailed)]
    assert failure.request_id == "huge"
    assert "above the bound of 5000" in failure.message
    assert tokens_of(received, "a") == [11, 12, 13]
    assert codes == [0]


def test_sending_to_a_closed_socket_raises_peer_gone():
    ours, theirs = socket.socketpair()
    with theirs:
        ours.close()
        channel = Channel(theirs)
        with pytest.raises(PeerGoneError):
            channel.send(StatsReply({}))
        with pytest.raises(PeerGoneError):
            channel.receive(1.0)


def test_the_backlog_is_sent_in_order_until_the_timeout():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        channel = Channel(theirs)
        sent = [StatsReply({"index": index, "pad": "x" * 4000}) for index in range(50)]
        for message in sent:
            channel.send(message)
        assert channel.num_backlog_bytes > 0
        channel.drain_backlog(0.05)  # nobody reads: it gives up in time
        assert channel.num_backlog_bytes > 0
        drainer = threading.Thread(target=channel.drain_backlog, args=(WAIT_S,))
        drainer.start()
        server = ApiServer(ours)
        assert [server.receive() for _ in sent] == sent
        drainer.join(WAIT_S)
        assert channel.num_backlog_bytes == 0


def test_a_draining_loop_ends_after_its_open_requests():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine = fake.FakeEngine({})
        engine.add(request("a"))
        loop = EngineLoop(engine, Channel(theirs))
        loop.drain()
        loop.run()
        assert not engine.running


class SlowToAdd(fake.FakeEngine):
    """Adding a request takes 2 ms of `now_s`."""

    def __init__(self, options):
        super().__init__(options)
        self.now_s = 0.0
        self.events = []

    def add(self, request):
        super().add(request)
        self.now_s += 0.002
        self.events.append("add")

    def step(self, *, launches=True):
        self.events.append("step")
        return super().step(launches=launches)


@pytest.mark.parametrize("is_running", [False, True])
def test_many_new_requests_delay_no_step(is_running, monkeypatch):
    """All enter one step if nothing runs; otherwise MESSAGES_S bounds those before each step."""
    monkeypatch.setattr(engine_loop, "MESSAGES_S", 0.005)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine = SlowToAdd({})
        if is_running:
            engine.add(request("first", max_tokens=20))
            engine.events.clear()
        adds = [AddRequest(request(f"r{index}", index + 1)) for index in range(10)]
        server = ApiServer(ours)
        server.send(*adds, AbortRequest("r9"), Shutdown(drain=True))
        EngineLoop(engine, Channel(theirs), clock=lambda: engine.now_s).run()
        theirs.shutdown(socket.SHUT_WR)
        server.receive()
        received = server.receive_all()
    before_each_step = " ".join(engine.events).split("step")
    num_added = [part.count("add") for part in before_each_step if "add" in part]
    assert num_added == ([3, 3, 3, 1] if is_running else [10])
    for index in range(9):
        assert tokens_of(received, f"r{index}") == [index + 2, index + 3, index + 4]
    assert engine.aborted == [["r9", 0]] and tokens_of(received, "r9") == []


class Overlapping(fake.FakeEngine):
    """A call of `step` launches a step, and the next call returns its outputs."""

    is_running = False

    def has_work(self, *, launches=True):
        return self.is_running or (launches and super().has_work())

    def step(self, *, launches=True):
        outputs = super().step() if self.is_running else []
        self.is_running = launches
        return outputs


def test_a_launched_step_is_finished_before_a_pause():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine = Overlapping({})
        engine.add(request("a", max_tokens=9))
        engine.step()
        server = ApiServer(ours)
        server.send(SetPaused(True), GetStats())
        thread = threading.Thread(target=EngineLoop(engine, Channel(theirs)).run)
        thread.start()
        server.receive()
        while not isinstance(message := server.receive(), Outputs):
            pass
        assert tokens_of([message], "a") == [11]
        server.send(GetStats())
        assert server.receive().stats["num_steps"] == 1
        assert not engine.is_running
        server.send(Shutdown(drain=False))
        thread.join()


def test_contents_come_in_pieces_and_are_joined():
    sizes = (0, 5, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES)
    contents = [Content(f"{size:032x}", (size,), bytes(size)) for size in sizes]
    wanted = Request("a", [10], DecodingParams(4), contents=tuple(contents))
    arriving, frames = ArrivingContents(), list(frames_of(wanted))
    *pieces, added = (decode_to_engine(frame[4:]) for frame in frames)
    assert max(map(len, frames)) < PIECE_BYTES + 1000 and len(pieces) == 7
    for piece in pieces:
        assert isinstance(piece, ContentValues)
        arriving.add(piece)
    assert arriving.complete(added.request) == wanted
    assert arriving.complete(added.request) is added.request
