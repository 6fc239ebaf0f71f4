"""The arguments of an agent, for `quire cluster agent` and for its own process."""

import argparse
from pathlib import Path

DEFAULT_PORT = 8100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the agent's command."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="port; 0: any free one (%(default)s)"
    )
    parser.add_argument(
        "--key-file",
        type=Path,
        required=True,
        metavar="FILE",
        help="the key that the cluster's machines share: openssl rand -hex 32 > FILE",
    )
    parser.add_argument(
        "--cpus", metavar="LIST", help="processors for the engine, such as 0,1 (all)"
    )
    parser.add_argument(
        "--with-process", type=int, metavar="PID", help="end when this process of the machine ends"
    )
    parser.add_argument(
        "--with-parent", action="store_true", help="end when standard input is closed"
    )
