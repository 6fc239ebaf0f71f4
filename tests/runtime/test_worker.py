"""What goes over a worker's socket, and what a worker makes of it."""

import socket
import threading

import pytest
from tests.runtime.fake_rank import RecordingRunner

from quire.core.sampling_params import DecodingParams
from quire.core.step import (
    BlockCopy,
    Chunk,
    EditKind,
    RowAdmission,
    RowFork,
    StepPlan,
    TableEdit,
    TokenEdit,
)
from quire.errors import CheckpointError
from quire.ipc import MessageError, PeerGoneError, send
from quire.runtime.worker import (
    Execute,
    Failed,
    FetchResult,
    Join,
    Joining,
    Reset,
    Sample,
    WorkerReady,
    receive_call,
    receive_news,
    serve_calls,
)

JOIN = Join({"model": None, "max_itl_ratio": 1.5}, 1, 2, "/somewhere/ranks")
PARAMS = DecodingParams(
    max_tokens=9,
    temperature=0.3,
    seed=2**64 - 1,
    end_token_ids=(1, 2),
    logprobs=3,
    logit_bias=((5, -1.5),),
    bad_words=((4,), (5, 6)),
    allowed_token_ids=(7, 8),
)
FULL_PLAN = StepPlan(
    step_id=2**40,
    num_rows=3,
    num_tokens=17,
    release=(4,),
    admit=(RowAdmission(1, [5, 6, 7], 2, 1, ((8, 9), ()), PARAMS, 3),),
    forks=(RowFork(2, 1, PARAMS, 4, joins_step=True),),
    token_edits=(TokenEdit(1, 2, (11, 12)),),
    table_edits=(
        TableEdit(1, 0, EditKind.APPEND, 2, (10,)),
        TableEdit(1, 1, EditKind.HOLE, 0, (-1,)),
    ),
    chunks=(Chunk(1, 15), Chunk(0, 0), Chunk(3, 3, (8, 9))),
    copies=(BlockCopy(1, 2),),
)


@pytest.fixture
def sockets():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def start_worker(sock, build):
    """A worker in a thread, and the list that its exit code will be in."""
    codes = []

    def work():
        with sock:
            codes.append(serve_calls(sock, build))

    thread = threading.Thread(target=work)
    thread.start()
    return thread, codes


@pytest.mark.parametrize(
    "message",
    [
        JOIN,
        Execute(FULL_PLAN),
        Execute(StepPlan(0, 1, 1)),
        Sample(),
        Sample({3: [b"\x00\xff"], 0: [b"", b""]}),
        FetchResult(),
        Reset(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_calls_arrive_as_they_were_sent(sockets, message) -> None:
    ours, theirs = sockets
    send(ours, Reset(), message)
    assert receive_call(theirs) == Reset()
    assert receive_call(theirs) == message


def test_long_messages_arrive_in_pieces(sockets) -> None:
    ours, theirs = sockets
    admission = RowAdmission(0, list(range(300_000)), 300_000, 0, ((),), PARAMS)
    message = Execute(StepPlan(0, 1, 1, admit=(admission,)))
    sender = threading.Thread(target=send, args=(ours, message))
    sender.start()
    assert receive_call(theirs) == message
    sender.join()


@pytest.mark.parametrize("news", [Joining(), WorkerReady(), Failed("checkpoint_error", "no file")])
def test_news_arrive_as_they_were_sent(sockets, news) -> None:
    ours, theirs = sockets
    send(theirs, news)
    assert receive_news(ours) == news


def test_the_end_of_the_socket_is_told_to_both_sides(sockets) -> None:
    ours, theirs = sockets
    theirs.close()
    with pytest.raises(PeerGoneError):
        receive_news(ours)
    with pytest.raises(PeerGoneError):
        send(ours, Reset())


def test_invalid_messages_are_refused(sockets) -> None:
    ours, theirs = sockets
    ours.sendall(b"\x00\x00\x00\x03\x91\xa1x")
    with pytest.raises(MessageError):
        receive_call(theirs)


def test_a_worker_makes_the_calls_in_their_order(sockets) -> None:
    ours, theirs = sockets
    runner, joins = RecordingRunner(), []

    def build(join, tell_joining):
        joins.append(join)
        tell_joining()
        return runner

    thread, codes = start_worker(theirs, build)
    send(ours, JOIN)
    assert receive_news(ours) == Joining()
    assert receive_news(ours) == WorkerReady()
    send(ours, Execute(FULL_PLAN), Sample(), Execute(StepPlan(8, 1, 1)), Sample({0: [b"\x01"]}))
    send(ours, FetchResult(), Reset())
    ours.close()
    thread.join()
    assert (joins, codes) == ([JOIN], [0])
    assert runner.calls == [
        f"execute {FULL_PLAN}",
        "sample None",
        f"execute {StepPlan(8, 1, 1)}",
        "sample {0: [b'\\x01']}",
        "result",
        "reset",
    ]


def test_a_worker_says_why_it_can_not_be_built(sockets) -> None:
    ours, theirs = sockets

    def build(_join, _tell_joining):
        raise CheckpointError("config.json does not exist")

    thread, codes = start_worker(theirs, build)
    send(ours, JOIN)
    assert receive_news(ours) == Failed("checkpoint_error", "config.json does not exist")
    thread.join()
    assert codes == [1]


def test_a_worker_says_what_a_step_failed_of(sockets, capsys) -> None:
    ours, theirs = sockets
    thread, codes = start_worker(theirs, lambda join, _: RecordingRunner({"fail_at": 3}))
    send(ours, JOIN, Execute(StepPlan(3, 1, 1)))
    assert receive_news(ours) == WorkerReady()
    failed = receive_news(ours)
    assert failed == Failed("internal_error", "RuntimeError: step 3 can't be computed")
    thread.join()
    assert codes == [1]
    assert "Traceback" in capsys.readouterr().err


def test_a_worker_that_fails_after_rank_0_has_gone_ends_quietly(sockets) -> None:
    ours, theirs = sockets

    def build(_join, _tell_joining):
        ours.close()
        raise CheckpointError("nobody hears this")

    send(ours, JOIN)
    thread, codes = start_worker(theirs, build)
    thread.join()
    assert codes == [0]


def test_the_last_to_go_tidy_up_where_the_ranks_have_met(sockets, tmp_path) -> None:
    """A rank 0 that was killed could not."""
    ours, theirs = sockets
    folder = tmp_path / "meeting"
    folder.mkdir()
    (folder / "ranks").touch()
    send(ours, Join({}, 1, 2, str(folder / "ranks")))
    thread, codes = start_worker(theirs, lambda *_: RecordingRunner())
    assert receive_news(ours) == WorkerReady()
    ours.close()
    thread.join()
    assert codes == [0] and not folder.exists() and tmp_path.exists()
