"""Measures speculative decoding: `python -m benchmarks.speculation --help`."""

import sys

from benchmarks.speculation.command import main
from quire.errors import QuireError

if __name__ == "__main__":
    try:
        main()
    except QuireError as error:
        sys.exit(f"error: {error}")
