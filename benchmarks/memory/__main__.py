"""Measures paging beside contiguous KV memory: `python -m benchmarks.memory --help`."""

import argparse
import sys

from benchmarks.memory.command import add_arguments, main
from quire.errors import QuireError

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory")
    add_arguments(parser)
    try:
        sys.exit(main(parser.parse_args()))
    except QuireError as error:
        sys.exit(f"error: {error}")
