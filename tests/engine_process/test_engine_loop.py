"""The loop behind the socket, driven through a real socket pair, with a fake engine inside."""

import contextlib
import os
import signal
import socket
import subprocess
import threading

import pytest
from tests.engine_client import fake_engine_process as fake

from quire import ipc
from quire.core.request import FinishReason, Request, ResumedBranch
from quire.core.sampling_params import DecodingParams
from quire.engine_client.messages import (
    AbortRequest,
    AddRequest,
    BlocksReply,
    ClearPrefixes,
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
    decode_to_server,
)
from quire.engine_process import engine_loop
from quire.engine_process.engine_loop import Channel, EngineLoop, build_and_serve
from quire.ipc import FrameSplitter, MessageError, PeerGoneError, encode

WAIT_S = 20.0


class Front:
    """The other end: blocking, each wait bounded."""

    def __init__(self, sock):
        sock.settimeout(WAIT_S)
        self.sock = sock
        self.splitter = FrameSplitter()
        self.inbox = []

    def send(self, *items):
        self.sock.sendall(b"".join(encode(item) for item in items))

    def receive(self):
        """The next message; None at the end of the stream."""
        while not self.inbox:
            data = self.sock.recv(1 << 16)
            if not data:
                return None
            self.inbox += [decode_to_server(body) for body in self.splitter.feed(data)]
        return self.inbox.pop(0)

    def receive_all(self):
        found = []
        while (message := self.receive()) is not None:
            found.append(message)
        return found


def request(request_id, *prompt, max_tokens=3, n=1):
    return Request(request_id, list(prompt or [10]), DecodingParams(max_tokens=max_tokens), n=n)


def tokens_of(received, request_id, branch=0):
    return [
        token
        for message in received
        if isinstance(message, Outputs)
        for output in message.outputs
        if (output.request_id, output.branch_index) == (request_id, branch)
        for token in output.token_ids
    ]


@contextlib.contextmanager
def served(build=fake.build, options=None):
    """A thread that runs build_and_serve, as (front, result list). The front has sent Start."""
    ours, theirs = socket.socketpair()
    codes = []

    def run():
        with theirs:
            codes.append(build_and_serve(theirs, build))

    thread = threading.Thread(target=run)
    thread.start()
    with ours:
        front = Front(ours)
        front.send(Start(options or {}))
        yield front, codes
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_request_gets_ready_then_its_tokens_then_the_end():
    with served() as (front, codes):
        engine = fake.FakeEngine({})
        assert front.receive() == Ready(engine.limits, engine.facts)
        front.send(AddRequest(request("a", 10)), Shutdown(drain=True))
        received = front.receive_all()
    assert tokens_of(received, "a") == [11, 12, 13]
    assert received[-1].outputs[-1].finish_reason is FinishReason.LENGTH
    assert codes == [0]


def test_progress_of_the_start_comes_before_ready():
    with served(options={"num_progress": 2}) as (front, codes):
        assert front.receive() == Progress("loading nothing", 1, 2)
        assert front.receive() == Progress("loading nothing", 2, 2)
        assert isinstance(front.receive(), Ready)
    assert codes == [0]


def test_a_resumed_request_gets_the_rest_of_the_branches_that_are_named():
    with served() as (front, _):
        front.receive()
        resumed = (ResumedBranch(1, (11, 12)), ResumedBranch(2))
        front.send(AddRequest(Request("a", [10], DecodingParams(4), n=3, resumed=resumed)))
        front.send(Shutdown(drain=True))
        received = front.receive_all()
    assert tokens_of(received, "a", 0) == []
    assert tokens_of(received, "a", 1) == [13, 14]
    assert tokens_of(received, "a", 2) == [11, 12, 13, 14]


def test_a_ping_is_answered_between_two_steps():
    with served(options={"step_s": 0.02}) as (front, _):
        front.receive()
        front.send(AddRequest(request("a", max_tokens=10**9)), Ping(), GetStats(), Ping())
        received = [front.receive()]
        while sum(isinstance(message, Pong) for message in received) < 2:
            received.append(front.receive())
        answers = [message for message in received if not isinstance(message, Outputs)]
        assert [type(message) for message in answers] == [Pong, StatsReply, Pong]
        front.send(Shutdown(drain=False))


def test_no_step_is_made_while_it_is_paused():
    with served() as (front, codes):
        front.receive()
        front.send(SetPaused(True), AddRequest(request("a")), ClearPrefixes(), GetStats())
        reply = front.receive()
        assert (reply.stats["num_running"], reply.stats["num_steps"]) == (1, 0)
        assert reply.stats["aborted"] == ["prefixes"]
        front.send(SetPaused(False))
        assert tokens_of([front.receive()], "a") == [11]
        front.send(SetPaused(True), AddRequest(request("b")), Shutdown(drain=True))
        received = front.receive_all()
    assert tokens_of(received, "a")[-1:] == [13] and tokens_of(received, "b") == [11, 12, 13]
    assert codes == [0]


def test_one_message_a_step_carries_all_sequences():
    with served() as (front, _):
        front.receive()
        adds = [AddRequest(request(f"r{index}", index, n=2)) for index in range(1, 9)]
        front.send(*adds, Shutdown(drain=True))
        received = front.receive_all()
    full = [message for message in received if len(message.outputs) == 16]
    assert len(received) <= 3 + 8  # three steps of all, and at most a ramp while they come in
    assert full
    for index in range(1, 9):
        for branch in (0, 1):
            assert tokens_of(received, f"r{index}", branch) == [index + 1, index + 2, index + 3]


def test_a_bad_request_is_refused_and_the_others_go_on():
    with served() as (front, _):
        front.receive()
        bad = request("bad", fake.REFUSE)
        front.send(AddRequest(request("a")), AddRequest(bad), AddRequest(request("b")))
        front.send(Shutdown(drain=True))
        received = front.receive_all()
    failures = [message for message in received if isinstance(message, RequestFailed)]
    assert failures == [
        RequestFailed("bad", "context_length_exceeded", "the prompt is refused", 400, "prompt")
    ]
    assert tokens_of(received, "a") == tokens_of(received, "b") == [11, 12, 13]


def test_an_abort_takes_effect_before_the_next_step():
    with served() as (front, _):
        front.receive()
        front.send(
            AddRequest(request("a", max_tokens=10_000, n=2)),
            AbortRequest("a", 1),
            AbortRequest("unheard-of"),
            GetStats(),
        )
        stats = front.receive()
        while not isinstance(stats, StatsReply):
            stats = front.receive()
        assert stats.stats["aborted"] == [["a", 1]]
        assert stats.stats["num_held_blocks"] == 1
        front.send(AbortRequest("a"), GetStats())
        while not isinstance(stats := front.receive(), StatsReply):
            pass
        assert stats.stats["num_held_blocks"] == 0
        front.send(Shutdown(drain=True))
        assert front.receive() is None


def test_questions_are_answered_in_their_order():
    with served() as (front, _):
        front.receive()
        front.send(GetMemory(), GetStats(), GetBlocks(8, 3), GetBlocks(10, 3))
        memory, stats, blocks, rest = (front.receive() for _ in range(4))
        assert isinstance(memory, MemoryReply) and isinstance(stats, StatsReply)
        assert memory.memory["total_bytes"] == memory.memory["free_bytes"] == 12 * 64
        assert isinstance(blocks, BlocksReply) and isinstance(rest, BlocksReply)
        assert [one["block"] for one in blocks.page["blocks"]] == [8, 9, 10]
        assert (blocks.page["next_block"], rest.page["next_block"]) == (11, None)
        front.send(Shutdown(drain=False))


def test_requests_that_come_while_it_drains_are_left_to_the_next_process():
    with served(options={"step_s": 0.01}) as (front, codes):
        front.receive()
        front.send(AddRequest(request("a", max_tokens=5)), Shutdown(drain=True))
        front.send(AddRequest(request("late")))
        received = front.receive_all()
    assert not any(isinstance(message, RequestFailed) for message in received)
    assert tokens_of(received, "late") == []
    assert tokens_of(received, "a") == [11, 12, 13, 14, 15]
    assert codes == [0]


def test_shutdown_without_draining_ends_at_once():
    with served() as (front, codes):
        front.receive()
        front.send(AddRequest(request("a", max_tokens=10**9)), Shutdown(drain=False))
        front.receive_all()
    assert codes == [0]


def test_an_engine_that_cannot_be_built_says_why():
    with served(options={"fail": "no config.json in /x"}) as (front, codes):
        assert front.receive_all() == [Fatal("checkpoint_error", "no config.json in /x")]
    assert codes == [1]


def test_an_unexpected_exception_is_fatal_and_reported(caplog):
    with served() as (front, codes):
        front.receive()
        front.send(AddRequest(request("a", fake.RAISE)))
        fatal = front.receive_all()[-1]
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
def test_a_front_that_talks_nonsense_is_told_so(first, reason):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(first)
        assert build_and_serve(theirs, fake.build) == 1
        fatal = Front(ours).receive()
    assert fatal.code == MessageError.code
    assert reason in fatal.message


def test_options_sent_twice_are_refused():
    with served() as (front, codes):
        front.receive()
        front.send(Start({}))
        assert "options twice" in front.receive().message
    assert codes == [1]


@pytest.mark.parametrize("max_tokens", [1, 10**9])
def test_the_end_of_the_stream_ends_the_loop(max_tokens):
    with served() as (front, codes):
        front.receive()
        front.send(AddRequest(request("a", max_tokens=max_tokens)))
        front.receive()
    assert codes == [0]


def test_a_front_that_does_not_read_stops_the_steps_but_not_the_listening(monkeypatch):
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
        assert isinstance(Front(ours).receive(), Ready)
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
    with served() as (front, codes):
        front.receive()
        front.send(AddRequest(request("huge", fake.HUGE)), AddRequest(request("a")))
        front.send(Shutdown(drain=True))
        received = front.receive_all()
    (failure,) = [message for message in received if isinstance(message, RequestFailed)]
    assert failure.request_id == "huge"
    assert "above the bound of 5000" in failure.message
    assert tokens_of(received, "a") == [11, 12, 13]
    assert codes == [0]


def test_sending_to_a_closed_socket_says_that_the_front_is_gone():
    ours, theirs = socket.socketpair()
    with theirs:
        ours.close()
        channel = Channel(theirs)
        with pytest.raises(PeerGoneError):
            channel.send(StatsReply({}))
        with pytest.raises(PeerGoneError):
            channel.receive(1.0)


def test_the_backlog_leaves_in_order_and_within_its_time():
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
        front = Front(ours)
        assert [front.receive() for _ in sent] == sent
        drainer.join(WAIT_S)
        assert channel.num_backlog_bytes == 0


def test_the_loop_can_be_told_to_drain_from_outside():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine = fake.FakeEngine({})
        engine.add(request("a"))
        loop = EngineLoop(engine, Channel(theirs))
        loop.drain()
        loop.run()
        assert not engine.running


class SlowToAdd(fake.FakeEngine):
    """Taking in a request takes 2 ms of `now_s`."""

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
def test_many_requests_at_once_hold_up_no_step(is_running, monkeypatch):
    """While nothing runs, all of them enter one step; else so many before each as fit its time."""
    monkeypatch.setattr(engine_loop, "MESSAGES_S", 0.005)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine = SlowToAdd({})
        if is_running:
            engine.add(request("first", max_tokens=20))
            engine.events.clear()
        adds = [AddRequest(request(f"r{index}", index + 1)) for index in range(10)]
        front = Front(ours)
        front.send(*adds, AbortRequest("r9"), Shutdown(drain=True))
        EngineLoop(engine, Channel(theirs), clock=lambda: engine.now_s).run()
        theirs.shutdown(socket.SHUT_WR)
        front.receive()
        received = front.receive_all()
    before_each_step = " ".join(engine.events).split("step")
    num_added = [part.count("add") for part in before_each_step if "add" in part]
    assert num_added == ([3, 3, 3, 1] if is_running else [10])
    for index in range(9):
        assert tokens_of(received, f"r{index}") == [index + 2, index + 3, index + 4]
    assert engine.aborted == [["r9", 0]] and tokens_of(received, "r9") == []


@contextlib.contextmanager
def spawned(options=None):
    """A real process of the fake engine, as (process, front)."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            command = [*fake.COMMAND, "--fd", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
        try:
            front = Front(ours)
            front.send(Start(options or {}))
            yield process, front
        finally:
            process.kill()
            process.wait(WAIT_S)


def test_sigint_is_left_to_the_front_and_sigterm_drains():
    with spawned({"step_s": 0.02}) as (process, front):
        assert isinstance(front.receive(), Ready)
        front.send(AddRequest(request("a", max_tokens=20)))
        received = [front.receive()]
        process.send_signal(signal.SIGINT)
        received.append(front.receive())
        process.send_signal(signal.SIGTERM)
        received += front.receive_all()
        assert process.wait(WAIT_S) == 0
    assert tokens_of(received, "a") == list(range(11, 31))


def test_sigterm_wakes_an_idle_process():
    with spawned() as (process, front):
        assert isinstance(front.receive(), Ready)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0


def test_the_process_ends_with_its_front_while_it_is_still_loading():
    with spawned({"hang_s": 600}) as (process, front):
        front.sock.close()
        assert process.wait(WAIT_S) == 1


def test_the_process_ends_with_its_front_in_the_middle_of_a_step(tmp_path):
    mark = tmp_path / "hangs"
    with spawned({"hang_at_step": 1, "hang_mark": str(mark)}) as (process, front):
        assert isinstance(front.receive(), Ready)
        front.send(AddRequest(request("a")))
        while not mark.exists():
            assert process.poll() is None
        front.sock.close()
        assert process.wait(WAIT_S) == 1


def test_a_process_that_is_sending_ends_with_its_front():
    with spawned() as (process, front):
        assert isinstance(front.receive(), Ready)
        front.send(AddRequest(request("a", max_tokens=10**9, n=64)))
        front.receive()
        os.kill(process.pid, 0)
        front.sock.close()
        process.wait(WAIT_S)
