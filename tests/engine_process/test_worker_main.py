"""The process of a rank as its parent sees it."""

import socket
import subprocess
import sys

from quire.ipc import send
from quire.runtime.worker import Failed, Join, receive_news

# Builds what `options` say: a rank that never ends, or one that can't be built.
PROGRAM = """
import sys, time
from quire.engine_process.worker_main import main
from quire.errors import CheckpointError

def build(join, tell_joining):
    assert "torch" not in sys.modules
    tell_joining()
    if "fail" in join.options:
        raise CheckpointError(join.options["fail"])
    time.sleep(60)

sys.exit(main(sys.argv[1:], build))
"""


def start(options: dict[str, str]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    with theirs:
        words = ["--fd", str(theirs.fileno()), "--log-level", "error"]
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words], pass_fds=(theirs.fileno(),)
        )
    send(ours, Join(options, 1, 2, "nowhere"))
    return ours, process


def test_a_rank_that_builds_its_runner_ends_with_its_parents_socket() -> None:
    sock, process = start({})
    receive_news(sock)
    sock.close()
    assert process.wait(10) == 1


def test_a_rank_that_can_not_be_built_says_why_and_ends() -> None:
    sock, process = start({"fail": "no weights"})
    with sock:
        receive_news(sock)
        assert receive_news(sock) == Failed("checkpoint_error", "no weights")
        assert process.wait(10) == 1
