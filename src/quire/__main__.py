"""Makes `python -m quire` run the command `quire`."""

import sys

from quire.cli.start import run_process

if __name__ == "__main__":
    sys.exit(run_process())
