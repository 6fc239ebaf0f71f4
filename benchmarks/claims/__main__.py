"""Measures what the literature promises of paging: `python -m benchmarks.claims --help`."""

import argparse
import sys

from benchmarks.claims.command import add_arguments, main
from quire.errors import QuireError

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.claims")
    add_arguments(parser)
    try:
        sys.exit(main(parser.parse_args()))
    except QuireError as error:
        sys.exit(f"error: {error}")
