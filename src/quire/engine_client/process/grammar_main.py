"""Process that makes grammars: `python -m quire.engine_client.process.grammar_main --fd N`.

The process reads the vocabulary once. Then it forks a worker for each socket that it receives, so a
worker starts with the vocabulary in memory. The process makes no grammars itself and starts no
threads, so it can always kill workers:

    API server ── begin, then "fork" with a socket, or "kill" ──▶ this process ──fork──▶ workers
      └───────────────── jobs, one at a time, and replies ─────────────────────────────┘

A worker does one job at a time, within limits of processor time and memory. The system kills a
worker that exceeds its limits. Started by `grammar_compilers`.
"""

import argparse
import contextlib
import gc
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import msgspec

from quire.engine_client.grammar_forms import form_of
from quire.errors import InvalidRequestError
from quire.ipc import PeerGoneError, decoder, receive, send
from quire.observability import log
from quire.text.grammars.compiler import GrammarCompiler
from quire.text.grammars.intersections.regex_sets import characters
from quire.text.parsers.dialect import Dialect
from quire.text.parsers.grammars.remembered_terms import forget_terms
from quire.text.tokenizer import Tokenizer

MAX_JOB_S = 2.0
"""Limit of one job's processor time, in seconds. Common schemas take milliseconds."""

MAX_JOB_BYTES = 768 << 20
"""Bytes of address space that a worker may use in addition to its size at the start."""

_MAX_KEPT_BYTES = 128 << 20
"""Bytes of memory. If a worker holds more when a job is done, a new worker replaces it."""

FORK = b"fork"
KILL = b"kill "
"""Packets on the control socket; a process id in decimal follows KILL."""


class Begin(msgspec.Struct, frozen=True):
    """The first packet."""

    #: The folder of the tokenizer.
    folder: str
    #: See `GrammarCompiler`.
    vocab_size: int
    dialect: Dialect


class Hello(msgspec.Struct, tag=True, frozen=True):
    """A worker's first message."""

    pid: int


class Job(msgspec.Struct, frozen=True):
    """A form, as `grammar_forms.as_text` writes it."""

    form: str


class Made(msgspec.Struct, tag=True, frozen=True):
    """The grammar of a job's form, which compiles."""

    #: None if any text is allowed.
    grammar: str | None
    #: Whether the worker takes no further job.
    is_last: bool = False


class RefusedForm(msgspec.Struct, tag=True, frozen=True):
    """The form is not supported. Has the message and the field of the InvalidRequestError to
    raise."""

    message: str
    param: str | None
    #: Whether the worker takes no further job.
    is_last: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process and return its exit code."""
    parser = argparse.ArgumentParser(prog="quire.engine_client.process.grammar_main")
    parser.add_argument("--fd", type=int, required=True, help="the inherited end of a socket pair")
    parser.add_argument("--log-level", default="warning")
    parser.add_argument("--log-format", default="text")
    arguments = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM):  # the server decides when this process ends
        signal.signal(number, signal.SIG_IGN)
    log.configure(arguments.log_level, arguments.log_format)
    with socket.socket(fileno=arguments.fd) as control:
        begin = msgspec.msgpack.decode(control.recv(1 << 20), type=Begin)
        tokenizer = Tokenizer.from_folder(Path(begin.folder), remembers_words=False)
        compiler = GrammarCompiler(tokenizer, begin.vocab_size, (), max_cached=0)
        compiler.vocabulary.make()
        gc.freeze()  # keeps workers from copying memory that they share with this process
        jobs = _serve(control)
    if jobs is None:
        return 0
    with jobs:
        _work(jobs, begin.dialect, compiler)
    return 0


def _serve(control: socket.socket) -> socket.socket | None:
    """Fork and kill workers until the server is gone, then kill all.

    Returns twice: in each worker the socket for its jobs, and in this process, at the end, None.
    """
    children: set[int] = set()

    def reap(_signum: int, _frame: FrameType | None) -> None:
        for pid in list(children):
            if os.waitpid(pid, os.WNOHANG)[0]:
                children.discard(pid)

    signal.signal(signal.SIGCHLD, reap)
    while True:
        try:
            packet, fds, _, _ = socket.recv_fds(control, 64, 1)
        except ConnectionResetError:  # the server is gone and has left packets unread
            break
        if not packet:
            break
        # Block `reap` meanwhile, so that the id of a child that has ended stays valid.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        if packet == FORK:
            pid = os.fork()
            if not pid:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
                return socket.socket(fileno=fds[0])
            children.add(pid)
            os.close(fds[0])
        elif int(packet.removeprefix(KILL)) in children:
            os.kill(int(packet.removeprefix(KILL)), signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    for pid in list(children):
        os.kill(pid, signal.SIGKILL)
    return None


def _work(sock: socket.socket, dialect: Dialect, compiler: GrammarCompiler) -> None:
    """Do jobs until the server is gone."""
    limit = _memory(0) + MAX_JOB_BYTES
    most_kept = _memory(1) + _MAX_KEPT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # there may be no writable /proc
        # If memory runs out, the system should kill this process and not the engine.
        Path("/proc/self/oom_score_adj").write_text("1000")
    decode = decoder(Job, "the API server")
    try:
        send(sock, Hello(os.getpid()))
        while True:
            job = decode(receive(sock))
            signal.setitimer(signal.ITIMER_PROF, MAX_JOB_S)  # SIGPROF ends the process
            reply = _reply(job.form, dialect, compiler)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            _forget()
            is_last = _memory(1) > most_kept
            send(sock, msgspec.structs.replace(reply, is_last=is_last))
            if is_last:
                return
    except (PeerGoneError, MemoryError):  # the server sees that the worker has ended
        return


def _forget() -> None:
    """Clear all caches, so that the duration of a job reveals nothing about earlier jobs."""
    forget_terms()
    characters.cache_clear()
    re.purge()


def _reply(text: str, dialect: Dialect, compiler: GrammarCompiler) -> Made | RefusedForm:
    try:
        grammar = form_of(text).grammar(dialect, compiler.tokenizer)
        if grammar is not None:
            compiler.compile(grammar)
    except InvalidRequestError as error:
        return RefusedForm(str(error), error.param)
    return Made(grammar)


def _memory(column: int) -> int:
    """Bytes of this process: its address space with column 0, its resident memory with 1."""
    return int(Path("/proc/self/statm").read_text().split()[column]) * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main())
