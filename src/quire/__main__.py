"""Makes `python -m quire` run the command `quire`."""

import sys

from quire.cli.start import main

if __name__ == "__main__":
    sys.exit(main())
