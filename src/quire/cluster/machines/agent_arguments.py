"""Command-line arguments of an agent, shared by `quire cluster agent` and the agent's process."""

import argparse
import os
from pathlib import Path

DEFAULT_PORT = 8100

NEW_KEY = "openssl req -x509 -newkey ed25519 -nodes -days 36500 -subj /CN=quire"
"""The command that makes a key, without its last arguments: -keyout FILE -out FILE."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the agent's command."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument(
        "--port", type=_port, default=DEFAULT_PORT, help="port; 0: any free one (%(default)s)"
    )
    parser.add_argument(
        "--key-file",
        type=Path,
        required=True,
        metavar="FILE",
        help=f"the key that the cluster's machines share: {NEW_KEY} -keyout FILE -out FILE",
    )
    parser.add_argument(
        "--cpus", type=_cpus, metavar="LIST", help="processors for the engine, such as 0,1 (all)"
    )
    parser.add_argument(
        "--with-process", type=int, metavar="PID", help="end when this process of the machine ends"
    )
    parser.add_argument(
        "--with-parent", action="store_true", help="end when standard input is closed"
    )


def _port(text: str) -> int:
    if not text.isdecimal() or not int(text) < 1 << 16:
        raise argparse.ArgumentTypeError(f"it is {text!r:.40}, but must be from 0 to 65535")
    return int(text)


def _cpus(text: str) -> str:
    usable = os.sched_getaffinity(0)
    numbers = text.split(",")
    if not all(number.isdecimal() and int(number) in usable for number in numbers):
        raise argparse.ArgumentTypeError(
            f"it is {text!r:.80}, but must be processors that this process may use, with commas"
            f" between them: {','.join(map(str, sorted(usable)))}"
        )
    return text
