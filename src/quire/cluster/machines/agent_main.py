"""The process of an agent: `python -m quire.cluster.machines.agent_main --key-file FILE`.

`quire cluster agent` runs it, and Ray's actors start it on their nodes. Once it listens it prints
one line of JSON with its host and port. It ends on a signal or, with `--with-parent`, when its
parent process ends.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence

from quire.child_process import redirect_start_text
from quire.cluster.machines.agent import Agent
from quire.cluster.machines.agent_arguments import add_arguments
from quire.cluster.machines.cluster_key import read_key
from quire.engine_client.process.early_process import ENGINE_COMMAND
from quire.errors import ConfigurationError, QuireError
from quire.observability import log


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal comes. Raises ConfigurationError for arguments that can't be used."""
    key = read_key(arguments.key_file)
    command = [*ENGINE_COMMAND]
    if arguments.cpus:
        command += ["--cpus", arguments.cpus]
    return asyncio.run(_serve(arguments, key, command))


async def _serve(arguments: argparse.Namespace, key: bytes, command: Sequence[str]) -> int:
    loop, end = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end.set)
    agent = Agent(key, command)
    try:
        port = await agent.listen(arguments.host, arguments.port)
    except OSError as error:
        raise ConfigurationError(
            f"can't listen on {arguments.host}, port {arguments.port}: {error.strerror or error}"
        ) from error
    print(json.dumps({"host": arguments.host, "port": port, "pid": os.getpid()}), flush=True)
    if arguments.with_parent:
        loop.add_reader(sys.stdin.fileno(), _end_at_eof, end)
    if arguments.with_process:
        try:
            loop.add_reader(os.pidfd_open(arguments.with_process), end.set)
        except ProcessLookupError:
            end.set()
    try:
        await end.wait()
    finally:
        await agent.close()
    return 0


def _end_at_eof(end: asyncio.Event) -> None:
    with contextlib.suppress(BlockingIOError):
        if os.read(sys.stdin.fileno(), 1) == b"":
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            end.set()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent and return the exit code."""
    parser = argparse.ArgumentParser(prog="quire.cluster.machines.agent_main")
    add_arguments(parser)
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--stderr-fd", type=int, help="inherited; see child_process.StartText")
    arguments = parser.parse_args(argv)
    if arguments.stderr_fd is not None:
        redirect_start_text(arguments.stderr_fd)
    log.configure(arguments.log_level)
    try:
        return run(arguments)
    except QuireError as error:
        print(f"quire: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
